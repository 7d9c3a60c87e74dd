//! Ctrl-C and SIGTERM.

/// Calls `asked` whenever the user or the system asks this process to end. Ends itself if that cannot be noticed.
pub(crate) async fn interrupts(mut asked: impl FnMut()) {
    #[cfg(unix)]
    let mut terminate = match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(signal) => signal,
        Err(_) => return,
    };
    loop {
        #[cfg(unix)]
        tokio::select! {
            result = tokio::signal::ctrl_c() => if result.is_err() { return },
            _ = terminate.recv() => {}
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            return;
        }
        asked();
    }
}
