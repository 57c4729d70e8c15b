//! Faults that wait until an instance reaches some point, and faults that change what surrounds it.

use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

use crate::{chaos::Chaos, excuse::Record, fault::Fault, instance::DATABASE};

/// How long an instance may take to reach the failpoint at which it is to die.
pub const DYING: Duration = Duration::from_secs(10);

/// How long an instance may leave a failed transaction open. This is shorter than the time-out after which
/// Postgres would end it, so that we see whether the instance did.
const CLOSING: Duration = Duration::from_secs(2);

/// No instance reached the point at which a fault waited, so the fault did not happen.
#[derive(Debug, thiserror::Error)]
#[error("nobody came there in time")]
pub struct Missed;

impl Chaos {
    /// Has an instance kill itself at a failpoint, and starts it again.
    pub async fn die(&self, fault: Fault, whom: usize) -> anyhow::Result<()> {
        let point = fault.point().context("no failpoint")?;
        let passing = 1 + whom / self.slots.len() % 3;
        let mut slot = self.slot(whom).lock().await;
        ensure!(slot.die_at(point, passing, DYING).await?, Missed);
        self.died(fault, whom);
        slot.start()
    }

    pub fn died(&self, fault: Fault, whom: usize) {
        let whom = whom % self.slots.len();
        self.ledger.fault(Record::of_death(fault, whom));
    }

    /// Restarts an instance with a clock that is an hour ahead or an hour behind.
    pub async fn skew_clock(&self, whom: usize) -> anyhow::Result<()> {
        let library = spawn_blocking(devstack::faketime).await??;
        let behind = (whom / self.slots.len()).is_multiple_of(2);
        let mut slot = self.slot(whom).lock().await;
        slot.leave().await?;
        slot.start_with_clock(&library, if behind { "-1h" } else { "+1h" })
    }

    /// Locks the table for so long that every statement on it runs into its time-out, inside an open
    /// transaction. An instance must then close that connection, and not use it again.
    pub async fn lock_table(&self) -> anyhow::Result<()> {
        let sql = "BEGIN; LOCK TABLE retry_queue; SELECT pg_sleep(3); COMMIT";
        self.do_to(move |s| s.postgres.psql(DATABASE, sql).map(drop))
            .await?;
        let given_up = async {
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE application_name \
                       LIKE 'torture-%' AND state = 'idle in transaction (aborted)'";
            while self.do_to(move |s| s.postgres.psql(DATABASE, sql)).await? != "0" {
                sleep(Duration::from_millis(50)).await;
            }
            anyhow::Ok(())
        };
        match timeout(CLOSING, given_up).await {
            Ok(asked) => asked?,
            Err(_) => self
                .ledger
                .unexpected("a failed transaction was kept open".into()),
        }
        Ok(())
    }
}
