//! `serve`: runs the service until it is asked to stop.

use tokio::signal::unix::{SignalKind, signal};

use crate::{app, app::App, config::Settings, observe::telemetry};

pub(super) async fn run(settings: Settings, dry_run: bool) -> anyhow::Result<()> {
    let instance = app::instance_name(&settings);
    telemetry::start(&settings, &instance)?;
    let app = App::new(settings, &instance).await?;
    tracing::info!(address = %app.address()?, "listening");
    if dry_run {
        return app.dry_run(asked_to_stop()).await;
    }
    app.run(asked_to_stop()).await
}

/// Resolves at SIGTERM or Ctrl-C. A second signal ends the process at once.
async fn asked_to_stop() {
    signalled().await;
    tokio::spawn(async {
        signalled().await;
        tracing::warn!("asked twice: leaving at once");
        std::process::exit(1);
    });
}

async fn signalled() {
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        }
        Err(_) => {
            let _ = tokio::signal::ctrl_c().await;
        }
    }
}
