//! Ctrl-C and SIGTERM.

use std::io;

/// The requests of the user or the system to stop.
pub(crate) struct Interrupts {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Interrupts {
    /// From now on, the requests no longer end the process by themselves.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            #[cfg(unix)]
            terminate: tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?,
        })
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) -> io::Result<()> {
        #[cfg(unix)]
        return tokio::select! {
            result = tokio::signal::ctrl_c() => result,
            _ = self.terminate.recv() => Ok(()),
        };
        #[cfg(not(unix))]
        tokio::signal::ctrl_c().await
    }
}

/// Calls `asked` at every request to stop, for as long as requests can be noticed.
pub(crate) async fn report(mut asked: impl FnMut()) {
    let Ok(mut interrupts) = Interrupts::new() else { return };
    while interrupts.next().await.is_ok() {
        asked();
    }
}
