//! A Postgres with a synchronous standby, which takes its place when it is killed.

use std::sync::{Arc, Mutex};

use anyhow::Context;
use devstack::{Stack, Standby};
use testkit::lock;

/// A RabbitMQ, and a Postgres each commit of which waits for a standby.
pub struct Promotion {
    pub stack: Arc<Stack>,
    standby: Mutex<Option<Standby>>,
}

impl Promotion {
    pub fn start() -> anyhow::Result<Self> {
        let stack = Stack::start_temporary("promotion")?;
        let site = Self {
            stack: Arc::new(stack),
            standby: Mutex::default(),
        };
        site.follow()?;
        Ok(site)
    }

    /// Makes a new standby of the Postgres that is in use.
    pub fn follow(&self) -> anyhow::Result<()> {
        let standby = self.stack.postgres.standby()?;
        *lock(&self.standby) = Some(standby);
        Ok(())
    }

    /// Kills Postgres and promotes the standby.
    pub fn fail_over(&self) -> anyhow::Result<()> {
        let standby = lock(&self.standby).take().context("there is no standby")?;
        self.stack.postgres.kill()?;
        self.stack.postgres.promote(standby)
    }
}
