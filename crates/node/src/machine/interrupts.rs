//! Requests to stop: Ctrl-C, a terminal that closes, a supervisor's signal, or the end of the process that started this
//! one.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::NodeError;

/// Requests that come closer together belong to one act: a terminal tells every process of a group, and a program that
/// started another one often passes on what both have got.
const ONE_ACT: Duration = Duration::from_secs(1);

/// How a process is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Save the run, or hand the share over.
    InGoodOrder,
    /// End now. Only a person who presses Ctrl-C again asks for this, since supervisors have SIGKILL.
    AtOnce,
}

/// Where a request comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Keyboard,
    /// A supervisor, the terminal's end, or the parent's end. They may all come, one after the other.
    Outside,
}

/// The requests of the user or the system to stop.
pub(crate) struct Interrupts {
    signals: Signals,
    /// Tells when the tether is cut. `None` once it has told.
    tether: Option<watch::Receiver<bool>>,
    /// The time of the first request.
    first: Option<Instant>,
}

impl Interrupts {
    /// From now on, the requests no longer end the process by themselves.
    pub(crate) fn new() -> Result<Self, NodeError> {
        let signals = Signals::new().map_err(|e| NodeError::State(format!("cannot wait for signals: {e}")))?;
        Ok(Self { signals, tether: Some(TETHER.subscribe()), first: None })
    }

    /// Waits for the next request that changes anything.
    pub(crate) async fn next(&mut self) -> Stop {
        loop {
            let source = tokio::select! {
                source = self.signals.next() => source,
                () = cut(&mut self.tether) => Source::Outside,
            };
            if let Some(stop) = judge(&mut self.first, source, Instant::now()) {
                return stop;
            }
        }
    }
}

/// Waits for a request to stop. From the call on, requests no longer end the process by themselves.
///
/// # Errors
///
/// The system refuses.
pub fn interrupted() -> Result<impl Future<Output = ()>, NodeError> {
    let mut interrupts = Interrupts::new()?;
    Ok(async move {
        interrupts.next().await;
    })
}

/// The meaning of a request, if it has one beside the first.
fn judge(first: &mut Option<Instant>, source: Source, now: Instant) -> Option<Stop> {
    match *first {
        None => {
            *first = Some(now);
            Some(Stop::InGoodOrder)
        }
        Some(first) => (source == Source::Keyboard && now - first >= ONE_ACT).then_some(Stop::AtOnce),
    }
}

/// Returns once the tether is cut, and only once.
async fn cut(tether: &mut Option<watch::Receiver<bool>>) {
    match tether {
        // An error says that the sender is gone, but it is never dropped.
        Some(cut) => drop(cut.wait_for(|cut| *cut).await),
        None => std::future::pending().await,
    }
    *tether = None;
}

/// Whether the tether is cut. Standard input belongs to the whole process, and so does this.
static TETHER: LazyLock<watch::Sender<bool>> = LazyLock::new(|| watch::Sender::new(false));

/// Lets the end of standard input be a request to stop. The process that started this one holds it open, so this one
/// stops however that one ends. `at_once`: nobody is left then to whom anything could be handed over.
pub fn tether(at_once: bool) {
    std::thread::spawn(move || {
        // What comes before the end is not for this process. What cannot be read has ended, too.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        if at_once || TETHER.receiver_count() == 0 {
            // Nothing has begun that could be saved, as with a signal that nobody waits for.
            std::process::exit(1);
        }
        TETHER.send_replace(true);
    });
}

/// Calls `asked` at every request to stop.
pub(crate) async fn report(mut interrupts: Interrupts, mut asked: impl FnMut(Stop)) {
    loop {
        asked(interrupts.next().await);
    }
}

#[cfg(unix)]
struct Signals {
    keyboard: tokio::signal::unix::Signal,
    outside: Vec<tokio::signal::unix::Signal>,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        // SIGXCPU says that the limit on processor time is near: SIGKILL follows.
        let mut outside = vec![SignalKind::terminate(), SignalKind::quit(), SignalKind::from_raw(libc::SIGXCPU)];
        // `nohup` wants a run to outlive its terminal. SIGINT and SIGQUIT are different: a shell ignores them for every
        // job in its background, whether anybody wanted that or not.
        if !is_ignored(libc::SIGHUP) {
            outside.push(SignalKind::hangup());
        }
        // With somebody who waits for it, a write beyond the limit on files is an error like that of a full disk.
        drop(signal(SignalKind::from_raw(libc::SIGXFSZ))?);
        let outside = outside.into_iter().map(signal).collect::<io::Result<_>>()?;
        Ok(Self { keyboard: signal(SignalKind::interrupt())?, outside })
    }

    async fn next(&mut self) -> Source {
        std::future::poll_fn(|context| {
            if self.outside.iter_mut().any(|signal| signal.poll_recv(context).is_ready()) {
                return Source::Outside.into();
            }
            self.keyboard.poll_recv(context).map(|_| Source::Keyboard)
        })
        .await
    }
}

/// Whether whoever started this process has it ignore a signal.
#[cfg(unix)]
fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with a null pointer for the new action, the call only writes the present one to a valid place, whose bytes
    // were all valid before.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

#[cfg(windows)]
struct Signals {
    keyboard: tokio::signal::windows::CtrlC,
    stop: tokio::signal::windows::CtrlBreak,
    close: tokio::signal::windows::CtrlClose,
    logoff: tokio::signal::windows::CtrlLogoff,
    shutdown: tokio::signal::windows::CtrlShutdown,
}

#[cfg(windows)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::windows::{ctrl_break, ctrl_c, ctrl_close, ctrl_logoff, ctrl_shutdown};
        Ok(Self {
            keyboard: ctrl_c()?,
            stop: ctrl_break()?,
            close: ctrl_close()?,
            logoff: ctrl_logoff()?,
            shutdown: ctrl_shutdown()?,
        })
    }

    async fn next(&mut self) -> Source {
        tokio::select! {
            _ = self.keyboard.recv() => Source::Keyboard,
            _ = self.stop.recv() => Source::Outside,
            _ = self.close.recv() => Source::Outside,
            _ = self.logoff.recv() => Source::Outside,
            _ = self.shutdown.recv() => Source::Outside,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_person_who_asks_again_is_in_a_hurry() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut first = None;
        assert_eq!(judge(&mut first, Source::Outside, at(0.0)), Some(Stop::InGoodOrder));
        // The terminal closes: the kernel tells the group, and the shell tells its jobs.
        assert_eq!(judge(&mut first, Source::Outside, at(0.1)), None);
        // `timeout` and `srun` may send more than one signal, at any time.
        assert_eq!(judge(&mut first, Source::Outside, at(60.0)), None);
        assert_eq!(judge(&mut first, Source::Keyboard, at(61.0)), Some(Stop::AtOnce));
        // Ctrl-C reaches this process and its parent, which passes it on.
        let mut first = None;
        assert_eq!(judge(&mut first, Source::Keyboard, at(0.0)), Some(Stop::InGoodOrder));
        assert_eq!(judge(&mut first, Source::Keyboard, at(0.2)), None);
        assert_eq!(judge(&mut first, Source::Keyboard, at(1.5)), Some(Stop::AtOnce));
    }

    #[cfg(unix)]
    #[test]
    fn a_signal_is_ignored_only_if_somebody_had_it_ignored() {
        assert!(!is_ignored(libc::SIGHUP));
        // The runtime of Rust ignores it, so that writing to a closed pipe is an error.
        assert!(is_ignored(libc::SIGPIPE));
    }
}
