//! How late messages arrive that each name their own due moment.

use std::time::{Duration, SystemTime};

use bench::{
    field::{Field, Way},
    inbox::Inbox,
    rows::epoch,
};
use tokio::time::{MissedTickBehavior, interval};

/// Messages a second.
pub const RATE: u32 = 200;

/// How long before it is due a message is published.
const LEAD: Duration = Duration::from_secs(2);

/// Sends messages at an even pace, and returns by how many milliseconds each of them was late at the
/// consumer.
pub async fn measure(
    field: &Field,
    way: &Way,
    count: u32,
    inbox: &mut Inbox,
) -> anyhow::Result<Vec<f64>> {
    let run = field.run();
    let ahead = field.rows.clock_ahead().await?;
    let first = Duration::from_secs_f64(epoch(SystemTime::now() + LEAD) + ahead);
    let first_ms = i64::try_from(first.as_millis())?;
    let due_ms = |number: u32| first_ms + i64::from(number) * 1000 / i64::from(RATE);
    let send = async {
        let mut ticks = interval(Duration::from_secs(1) / RATE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        for number in 0..count {
            ticks.tick().await;
            let sent = field
                .producer
                .send_due_at(&way.entry, run, number, due_ms(number));
            sent.await?;
        }
        anyhow::Ok(())
    };
    let ((), arrived) = tokio::try_join!(send, inbox.collect(run, count))?;
    inbox.nothing_more()?;
    let late = |(number, at): (u32, &SystemTime)| {
        let at = epoch(*at) + ahead;
        at * 1e3 - due_ms(number) as f64
    };
    Ok((0..count).zip(&arrived.wall).map(late).collect())
}
