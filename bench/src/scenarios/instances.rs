//! Several instances on one database and one queue.

use futures::future::try_join_all;

use crate::{
    field::{Field, Way, progress},
    finding::{Finding, Reach},
    producer::Load,
};

const NAME: &str = "instances";
const COUNTS: [usize; 3] = [1, 2, 4];

pub async fn run(field: &mut Field) -> anyhow::Result<Vec<Finding>> {
    let lane = field.lane("instances").await?;
    let mut inbox = field.inbox(1).await?;
    let way = Way::through(&lane);
    let load = Load {
        count: field.pick(8_000, 50_000),
        size: 1024,
        targets: 1,
    };
    // New instances are slower at first: they prepare and plan their statements on each connection.
    let warm_up = Load {
        count: load.count / 2,
        ..load
    };
    let rounds = field.rounds(3);
    let mut rates = [const { Vec::new() }; COUNTS.len()];
    for round in 0..rounds {
        progress(&format!("{NAME}: round {} of {rounds}", round + 1));
        for turn in 0..COUNTS.len() {
            let index = (turn + round) % COUNTS.len();
            let starting = (0..COUNTS[index]).map(|_| field.scheduler(&lane, &[]));
            let schedulers = try_join_all(starting).await?;
            field.race(&way, warm_up, &mut inbox).await?;
            rates[index].push(field.race(&way, load, &mut inbox).await?);
            try_join_all(schedulers.into_iter().map(|s| s.stop())).await?;
        }
    }
    let [one, two, four] = rates;
    let rate = |what: &str, samples| Finding::new(NAME, what, "messages/s", samples);
    Ok(vec![
        rate("1 instance", one.clone()),
        rate("2 instances", two)
            .against("1", &one)
            .reach(Reach::AtLeast(1.0)),
        rate("4 instances", four)
            .against("1", &one)
            .reach(Reach::AtLeast(1.0)),
    ])
}
