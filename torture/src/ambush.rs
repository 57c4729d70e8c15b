//! Faults that wait for their moment, and those that change an instance's world.

use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};

use crate::{chaos::Chaos, excuse::Record, fault::Fault, instance::DATABASE};

/// How long an instance may take to come to where it dies.
const DYING: Duration = Duration::from_secs(10);

/// How long a transaction that failed may stay open: less than the time-out by
/// which Postgres would end it.
const CLOSING: Duration = Duration::from_secs(2);

/// Nobody came to where a fault waited.
#[derive(Debug, thiserror::Error)]
#[error("nobody came there in time")]
pub struct Missed;

impl Chaos {
    /// An instance dies at a failpoint, and is started again.
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

    /// Odd ones are an hour ahead, even ones behind.
    pub async fn skew_clock(&self, whom: usize) -> anyhow::Result<()> {
        let library = spawn_blocking(devstack::faketime).await??;
        let behind = (whom / self.slots.len()).is_multiple_of(2);
        let mut slot = self.slot(whom).lock().await;
        slot.leave().await?;
        slot.start_with_clock(&library, if behind { "-1h" } else { "+1h" })
    }

    /// Every statement on it runs into its time-out, inside an open transaction.
    /// Whoever that happens to must close the connection, not go on with it.
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
