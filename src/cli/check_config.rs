//! `check-config`: whether the service would start with these settings and policies.

use crate::{app, broker::Broker, config::Settings, store::Store};

/// Checks all that the service checks before it starts, then prints the settings and a
/// line for each policy.
pub(super) fn run(settings: &Settings) -> anyhow::Result<()> {
    Broker::new(settings)?;
    Store::open(settings, "check-config")?;
    let book = app::policy_book(settings)?;
    print!("{}\n{}", settings.describe(), book.describe());
    Ok(())
}
