//! The testbeds, and the job and testbed files that describe them.
//!
//! No constant of the simulator was fitted on any of these rates, latencies or models. Do not fit one on them.

use std::fmt::Write as _;
use std::path::PathBuf;

/// A model, and how it is trained.
#[derive(Clone, Copy)]
pub(crate) enum Model {
    /// A GPT-2 on the text that the program carries.
    Gpt2 { layers: u32, width: u32, heads: u32, context: u32, batch: u32, micro_batch: u32 },
    /// A ResNet on images of 32 x 32.
    Resnet { depth: u32, width: u32, batch: u32, micro_batch: u32 },
}

/// The way in which the model is cut.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Cut {
    /// At the places where the step is shortest.
    Fastest,
    /// Evenly over all devices. The fastest cut may leave devices out, and with them their links.
    EveryDevice,
    /// Over the first devices, as many as this. The others are their replicas, equally many of each.
    Stages(usize),
}

/// The links between devices, in Mbps and ms.
#[derive(Clone, Copy)]
pub(crate) enum Network {
    /// Between each two devices.
    Mesh { rate: f64, latency: f64 },
    /// Homes of two devices; the rate is that of a home's uplink.
    Homes { rate: f64, latency: f64 },
    /// Network namespaces, one a device, with uplinks that the kernel shapes.
    Kernel { rate: f64 },
}

/// One row of the table.
pub(crate) struct Testbed {
    pub(crate) name: &'static str,
    pub(crate) model: Model,
    pub(crate) codec: &'static str,
    /// The slowdown of each device.
    pub(crate) devices: &'static [f64],
    pub(crate) network: Network,
    pub(crate) cut: Cut,
}

const WIDE: Model = Model::Gpt2 { layers: 6, width: 256, heads: 8, context: 64, batch: 16, micro_batch: 4 };
const DEEP: Model = Model::Gpt2 { layers: 10, width: 160, heads: 5, context: 96, batch: 12, micro_batch: 2 };
const RESNET: Model = Model::Resnet { depth: 34, width: 32, batch: 12, micro_batch: 3 };

pub(crate) const TESTBEDS: &[Testbed] = &[
    Testbed {
        name: "2 peers, 30 Mbps 35 ms",
        model: WIDE,
        codec: "none",
        devices: &[2.5, 2.5],
        network: Network::Mesh { rate: 30.0, latency: 35.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "3 uneven peers, 300 Mbps 1 ms",
        model: DEEP,
        codec: "none",
        devices: &[2.5, 5.0, 3.0],
        network: Network::Mesh { rate: 300.0, latency: 1.0 },
        cut: Cut::Fastest,
    },
    Testbed {
        name: "4 peers, 15 Mbps 40 ms",
        model: WIDE,
        codec: "none",
        devices: &[4.5; 4],
        network: Network::Mesh { rate: 15.0, latency: 40.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "6 peers in 3 homes, 30 Mbps 15 ms shared",
        model: DEEP,
        codec: "none",
        devices: &[6.5; 6],
        network: Network::Homes { rate: 30.0, latency: 15.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "4 peers in 2 homes, 12 Mbps 25 ms shared, int8",
        model: WIDE,
        codec: "int8",
        devices: &[4.5; 4],
        network: Network::Homes { rate: 12.0, latency: 25.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "3 stages x 2 replicas, 80 Mbps 3 ms",
        model: WIDE,
        codec: "none",
        devices: &[6.5; 6],
        network: Network::Mesh { rate: 80.0, latency: 3.0 },
        cut: Cut::Stages(3),
    },
    Testbed {
        name: "8 replicas with cards of 60 Mbps",
        model: Model::Gpt2 { layers: 6, width: 256, heads: 8, context: 64, batch: 16, micro_batch: 2 },
        codec: "none",
        devices: &[8.5; 8],
        network: Network::Mesh { rate: 60.0, latency: 2.0 },
        cut: Cut::Stages(1),
    },
    Testbed {
        name: "ResNet-34, 2 uneven peers, 60 Mbps 8 ms",
        model: RESNET,
        codec: "none",
        devices: &[2.5, 4.0],
        network: Network::Mesh { rate: 60.0, latency: 8.0 },
        cut: Cut::Fastest,
    },
    Testbed {
        name: "kernel: 3 peers, 40 Mbps",
        model: DEEP,
        codec: "none",
        devices: &[3.5; 3],
        network: Network::Kernel { rate: 40.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "5 peers, 120 Mbps 12 ms",
        model: Model::Gpt2 { layers: 8, width: 192, heads: 6, context: 128, batch: 10, micro_batch: 2 },
        codec: "none",
        devices: &[5.5; 5],
        network: Network::Mesh { rate: 120.0, latency: 12.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "2 peers, 9 Mbps 20 ms, top-k",
        model: Model::Gpt2 { layers: 5, width: 320, heads: 10, context: 80, batch: 8, micro_batch: 2 },
        codec: "topk",
        devices: &[3.0, 3.0],
        network: Network::Mesh { rate: 9.0, latency: 20.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "2 stages x 3 replicas, 150 Mbps 6 ms",
        model: DEEP,
        codec: "none",
        devices: &[6.5; 6],
        network: Network::Mesh { rate: 150.0, latency: 6.0 },
        cut: Cut::Stages(2),
    },
    Testbed {
        name: "3 replicas, 250 Mbps 60 ms",
        model: WIDE,
        codec: "none",
        devices: &[3.5; 3],
        network: Network::Mesh { rate: 250.0, latency: 60.0 },
        cut: Cut::Stages(1),
    },
    Testbed {
        name: "ResNet-18, 4 peers in 2 homes, 45 Mbps 10 ms shared",
        model: Model::Resnet { depth: 18, width: 48, batch: 16, micro_batch: 4 },
        codec: "none",
        devices: &[4.5; 4],
        network: Network::Homes { rate: 45.0, latency: 10.0 },
        cut: Cut::EveryDevice,
    },
    Testbed {
        name: "kernel: 2 uneven peers, 20 Mbps",
        model: WIDE,
        codec: "none",
        devices: &[2.5, 4.0],
        network: Network::Kernel { rate: 20.0 },
        cut: Cut::EveryDevice,
    },
];

impl Testbed {
    /// The job file.
    pub(crate) fn job(&self) -> String {
        let (model, data, batch, micro_batch) = match self.model {
            Model::Gpt2 { layers, width, heads, context, batch, micro_batch } => (
                format!("{{ family = \"gpt2\", n_layer = {layers}, n_embd = {width}, n_head = {heads} }}"),
                format!("{{ kind = \"text\", context = {context} }}"),
                batch,
                micro_batch,
            ),
            Model::Resnet { depth, width, batch, micro_batch } => (
                format!("{{ family = \"resnet\", depth = {depth}, width = {width} }}"),
                "{ kind = \"cifar10\", train = \"train.bin\" }".to_owned(),
                batch,
                micro_batch,
            ),
        };
        let plan = match self.cut {
            Cut::EveryDevice => "plan = { scheduler = \"equal-compute\" }\n",
            Cut::Fastest | Cut::Stages(_) => "",
        };
        // A copy takes half of a slow link for minutes and then leaves it alone for hours, which no step's median shows.
        format!(
            "model = {model}\ndata = {data}\n{plan}compression = {{ name = \"{}\" }}\n\
             eval = {{ every = 0 }}\ncheckpoint = {{ every = 1000000, copies = false }}\n\
             [train]\nbatch = {batch}\nmicro_batch = {micro_batch}\noptimizer = {{ name = \"adamw\", warmup = 0 }}\n",
            self.codec
        )
    }

    /// The testbed file for the first `count` devices. The profile of those with a slowdown lies at `profile`.
    pub(crate) fn file(&self, count: usize, profile: impl Fn(f64) -> PathBuf) -> String {
        let mut text = String::new();
        for (i, slowdown) in self.devices.iter().enumerate().take(count) {
            let site = match self.network {
                Network::Mesh { .. } => "all".to_owned(),
                Network::Homes { .. } => format!("home-{}", i / 2),
                Network::Kernel { .. } => format!("host-{i}"),
            };
            let profile = profile(*slowdown);
            let _ = write!(
                text,
                "[[device]]\nname = \"peer-{i}\"\nsite = \"{site}\"\nprofile = {profile:?}\n\
                 threads = 1\nslowdown = {slowdown}\n"
            );
        }
        match self.network {
            Network::Mesh { rate, latency } => {
                let _ = write!(text, "[[site]]\nname = \"all\"\nrate = \"{rate} Mbps\"\nlatency = \"{latency} ms\"\n");
            }
            Network::Homes { rate, latency } => {
                for home in 0..count.div_ceil(2) {
                    let _ = write!(
                        text,
                        "[[site]]\nname = \"home-{home}\"\nrate = \"1 Gbps\"\n\
                         uplink = {{ rate = \"{rate} Mbps\", latency = \"{latency} ms\" }}\n"
                    );
                }
            }
            Network::Kernel { rate } => {
                for host in 0..=count {
                    let _ = write!(text, "[[site]]\nname = \"host-{host}\"\nuplink = {{ rate = \"{rate} Mbps\" }}\n");
                }
                let _ = write!(text, "[broker]\nat = \"host-{count}\"\n");
            }
        }
        text
    }
}
