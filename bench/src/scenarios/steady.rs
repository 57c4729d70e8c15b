//! Sends messages at an even pace, and tells when each of them was due, settled and received.

use std::time::{Duration, SystemTime};

use anyhow::ensure;
use tokio::time::{MissedTickBehavior, interval};

use crate::{
    field::{Field, Lane},
    inbox::Inbox,
    rows::epoch,
};

/// Messages at an even pace.
#[derive(Clone, Copy)]
pub struct Steady {
    /// Messages a second.
    pub rate: u32,
    pub seconds: u32,
    pub due: Due,
}

/// Who says when a message is due.
#[derive(Clone, Copy)]
pub enum Due {
    /// The policy. Intake stores messages in batches, and Postgres adds the delay to the moment of
    /// the batch: messages of one batch are due together.
    ByPolicy,
    /// The message itself: so long after the moment at which it is to be published. Messages are
    /// then due at the same even pace, to the millisecond: that is how exactly a message can tell.
    Own { lead: Duration },
}

/// What became of one message, in seconds of Postgres's clock.
pub struct Fate {
    /// The moment that the message named, else the one in its row.
    pub due: f64,
    pub settled: f64,
    /// When the consumer received it. Measured by the benchmark's clock and converted.
    pub arrived: f64,
}

impl Steady {
    /// Sends the messages, waits until all of them are received and settled, and returns what
    /// became of each, in no particular order.
    pub async fn send(
        self,
        field: &Field,
        lane: &Lane,
        inbox: &mut Inbox,
    ) -> anyhow::Result<Vec<Fate>> {
        let (run, count) = (field.run(), self.rate * self.seconds);
        let ahead = field.rows.clock_ahead().await?;
        let first_due_ms = match self.due {
            Due::ByPolicy => None,
            Due::Own { lead } => {
                let first = Duration::from_secs_f64(epoch(SystemTime::now() + lead) + ahead);
                Some(i64::try_from(first.as_millis())?)
            }
        };
        let due_ms =
            |number: u32| Some(first_due_ms? + i64::from(number) * 1000 / i64::from(self.rate));
        let send = async {
            let mut ticks = interval(Duration::from_secs(1) / self.rate);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            for number in 0..count {
                ticks.tick().await;
                let (producer, to) = (&field.producer, &lane.intake);
                match due_ms(number) {
                    None => producer.send_one(to, run, number, 0).await?,
                    Some(due_ms) => producer.send_due_at(to, run, number, due_ms).await?,
                }
            }
            anyhow::Ok(())
        };
        let ((), arrived) = tokio::try_join!(send, inbox.collect(run, count))?;
        field.rows.until_settled(&lane.schema).await?;
        inbox.nothing_more()?;
        let times = field.rows.times(&lane.schema, run).await?;
        ensure!(times.len() == count as usize, "rows are missing");
        let fates = times.iter().map(|time| Fate {
            due: due_ms(time.number).map_or(time.due, |ms| ms as f64 / 1e3),
            settled: time.settled,
            arrived: epoch(arrived.wall[time.number as usize]) + ahead,
        });
        Ok(fates.collect())
    }
}
