//! A standby takes the place of a Postgres that died.

use std::time::Duration;

use devstack::Stack;

use crate::{chaos::Chaos, fault::Fault};

impl Chaos {
    /// Makes a standby, kills Postgres, and promotes the standby. No other fault has a standby, and so none has
    /// to treat two.
    pub async fn promote(&self, fault: Fault) -> anyhow::Result<Option<Duration>> {
        let standby = self.do_to(|s| s.postgres.standby()).await?;
        let kill = |s: &Stack| s.postgres.kill();
        let promote = move |s: &Stack| s.postgres.promote(standby);
        let red = self.outage(fault, kill, promote).await?;
        let port = self.stack.postgres.port();
        self.own.lead_to(port);
        for slot in &self.slots {
            slot.lock().await.postgres.lead_to(port);
        }
        Ok(red)
    }
}
