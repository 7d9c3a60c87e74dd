//! `relay`.

use fusionllm_node::{NodeError, RelayCommand};

use crate::args::RelayArgs;
use crate::failure::Failure;
use crate::output::{print, print_json, tell};
use crate::train::runtime;

/// Runs a relay until it is interrupted.
pub(crate) fn relay(args: RelayArgs, json: bool) -> Result<(), Failure> {
    let RelayArgs { listen, host, secret } = args;
    let kept = secret.is_some();
    let command = RelayCommand { listen, host, secret };
    let started = |url: &fusionllm_node::RelayUrl, listen| {
        let shown = match json {
            true => print_json(&serde_json::json!({ "url": url.full(), "listen": listen })),
            false => print(&format!("relay = \"{}\"\n", url.full())),
        };
        tell(format_args!(
            "put this line into [network] of a job. Other machines must reach {url} with TCP and UDP. Ctrl-C stops the relay"
        ));
        if !kept {
            tell("the next relay has another URL, unless --secret FILE keeps this one's secret");
        }
        shown.map_err(|failure| NodeError::State(failure.message().to_owned()))
    };
    Ok(runtime()?.block_on(fusionllm_node::relay(command, started))?)
}
