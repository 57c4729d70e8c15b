//! `cargo dev torture`: is anything ever lost?
//!
//! A campaign starts a Postgres, a RabbitMQ and instances of the real binary, and sends them messages while faults
//! happen. In the end every message that RabbitMQ confirmed to a producer must be back in its queue, in review, or in a
//! row that waits.
//!
//! In reading order: [`campaign`] is the whole of it; [`setup`] is the broker's side of it; [`message`] is what is sent,
//! by the producers in [`post`], to the [`consumer`]s; [`fault`] lists the faults, which [`chaos`], [`ambush`], [`disk`],
//! [`promote`] and [`strange`], with [`unreadable`], carry out on each [`instance`]; [`ledger`], [`excuse`] and [`rows`]
//! come to the verdict. [`plant`] and [`controls`] show that the verdict can be a bad one. [`steady`](mod@steady) is a
//! load without faults, [`failover`](mod@failover) one on servers that take each other's place, and
//! [`upgrade`](mod@upgrade) one on instances of two versions that do.

mod ambush;
mod campaign;
mod chaos;
mod consumer;
mod controls;
mod disk;
mod excuse;
mod failover;
mod fault;
mod instance;
mod ledger;
mod message;
mod plant;
mod post;
mod promote;
mod rows;
mod setup;
mod steady;
mod strange;
mod unreadable;
mod upgrade;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::{Parser, ValueEnum, builder::ArgPredicate};
use tokio_util::sync::CancellationToken;

use crate::{
    campaign::Campaign, failover::Failover, fault::Fault, ledger::Verdict, plant::Plant,
    steady::Steady, upgrade::Upgrade,
};

const AFTER_HELP: &str = "\
Exit status: 0 when nothing was lost, unexpected or over its bound, 1 otherwise.
With --controls: 0 when every control was caught.

On another RabbitMQ than the installed one:
  cargo dev torture --rabbitmq 4.0
A long one, of half an hour or so:
  cargo dev torture --rabbitmq 4.0 --messages 100000 --instances 4 --faults 200 --kills 500 --seconds 1800
One that must fail, because rows are deleted behind the service's back:
  cargo dev torture --messages 500 --faults 0 --seconds 5 --plant lose-rows
One with a bug in the service, of those in src/plant.rs:
  RETRY_PLANT=IgnoreReturns cargo dev torture --faults 3 --only target-gone
All of that kind, which must all be caught, in some minutes:
  cargo dev torture --controls
No faults, but an hour of ordinary work on the release build, in which nothing may grow:
  cargo dev torture --steady 3600 --rate 200
Nodes of a cluster killed under load, or a standby promoted; on other versions, which come first:
  cargo dev torture --cluster
  cargo dev torture --postgres 17 --rabbitmq 4.0 --promotion
Instances of two versions side by side:
  cargo dev upgrade --help";

/// Do everything to retry-scheduler that can be done, and see whether a message is lost.
///
/// Runs instances of the real binary between producers and consumers, with a
/// Postgres and a RabbitMQ of their own, while faults happen. All queues are
/// quorum queues with a delivery limit. Half of the messages come as dead
/// letters, by an exchange that is bound by their routing keys only. The seed
/// decides which faults, to whom, and after which pause.
#[derive(Debug, Parser)]
#[command(
    name = "cargo dev torture",
    bin_name = "cargo dev torture",
    after_help = AFTER_HELP,
    args_override_self = true
)]
struct Args {
    /// Chooses the faults [default: random]
    #[arg(long, default_value_t = fastrand::u64(..1_000_000), hide_default_value = true)]
    seed: u64,
    /// Messages to send
    #[arg(
        long,
        default_value_t = 3000,
        default_value_ifs([
            ("cluster", ArgPredicate::IsPresent, "20000"),
            ("promotion", ArgPredicate::IsPresent, "20000"),
            ("upgrade_from", ArgPredicate::IsPresent, "20000"),
        ])
    )]
    messages: usize,
    /// Instances of the service
    #[arg(
        long,
        default_value_t = 3,
        default_value_ifs([
            ("steady", ArgPredicate::IsPresent, "2"),
            ("cluster", ArgPredicate::IsPresent, "2"),
            ("promotion", ArgPredicate::IsPresent, "2"),
        ])
    )]
    instances: usize,
    /// Faults, one after the other
    #[arg(
        long,
        default_value_t = 15,
        default_value_ifs([
            ("cluster", ArgPredicate::IsPresent, "3"),
            ("promotion", ArgPredicate::IsPresent, "3"),
        ])
    )]
    faults: usize,
    /// SIGKILLs at random moments, beside the other faults
    #[arg(long, default_value_t = 5)]
    kills: usize,
    /// Over how long to spread messages and faults, at least
    #[arg(
        long,
        default_value_t = 40,
        default_value_ifs([
            ("cluster", ArgPredicate::IsPresent, "120"),
            ("promotion", ArgPredicate::IsPresent, "120"),
            ("upgrade_from", ArgPredicate::IsPresent, "120"),
        ]),
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    seconds: u64,
    /// Only these faults [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Fault>,
    /// Do something wrong, to see it noticed
    #[arg(long, value_enum)]
    plant: Option<Plant>,
    /// No faults: a steady load for so many seconds, and whether anything grows meanwhile
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(180..))]
    steady: Option<u64>,
    /// Messages a second of a steady load
    #[arg(long, default_value_t = 200, requires = "steady")]
    rate: u32,
    /// Instead: three nodes of RabbitMQ, all queues quorum, and each node killed under load in its turn
    #[arg(long, conflicts_with_all = ["promotion", "steady", "only", "plant", "kills"])]
    cluster: bool,
    /// Instead: a Postgres with a synchronous standby, which is promoted when the first one is killed under load
    #[arg(long, conflicts_with_all = ["steady", "only", "plant", "kills"])]
    promotion: bool,
    /// Only show that the campaign notices bugs: a short one with each, which must fail
    #[arg(long, exclusive = true)]
    controls: bool,
    /// Instead: instances of this binary are replaced by those of another, and back; `cargo dev upgrade` builds both
    #[arg(
        long,
        value_name = "BINARY",
        hide = true,
        requires = "upgrade_to",
        conflicts_with_all = ["promotion", "cluster", "steady", "only", "plant", "kills", "faults"]
    )]
    upgrade_from: Option<PathBuf>,
    /// The binary by whose instances they are replaced
    #[arg(long, value_name = "BINARY", hide = true, requires = "upgrade_from")]
    upgrade_to: Option<PathBuf>,
    /// Give up early, for what ends badly anyway
    #[arg(long, hide = true)]
    brief: bool,
}

impl Args {
    fn kinds(&self) -> Vec<Fault> {
        if self.only.is_empty() {
            Fault::value_variants().to_vec()
        } else {
            self.only.clone()
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let fails_over = args.cluster || args.promotion;
    let versions = args.upgrade_from.as_deref().zip(args.upgrade_to.as_deref());
    let has_faults = args.steady.is_none() && !fails_over && versions.is_none();
    if has_faults && args.kinds().iter().any(|fault| fault.fills_disk()) {
        disk::set_apart();
    }
    let stop = CancellationToken::new();
    tokio::spawn({
        let stop = stop.clone();
        async move {
            testkit::interrupted().await;
            stop.cancel();
        }
    });
    if args.controls {
        return match stop.run_until_cancelled(controls::run()).await {
            Some(Ok(true)) => ExitCode::SUCCESS,
            Some(Ok(false)) => ExitCode::FAILURE,
            Some(Err(e)) => {
                eprintln!("torture: {e:#}");
                ExitCode::FAILURE
            }
            None => ExitCode::from(130),
        };
    }
    let logs = std::env::temp_dir().join(format!("torture-{}", std::process::id()));
    let done = match (args.steady, versions) {
        (Some(seconds), _) => steady(&args, Duration::from_secs(seconds), &logs, &stop).await,
        (None, Some((old, new))) => upgrade(&args, old, new, &logs, &stop).await,
        (None, None) if fails_over => failover(&args, &logs, &stop).await,
        (None, None) => torture(&args, &logs, &stop).await,
    };
    match done {
        Ok(Some(good)) => {
            if good || args.brief {
                let _ = std::fs::remove_dir_all(&logs);
            } else {
                eprintln!("The instances' logs are in {}", logs.display());
            }
            if good {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Ok(None) => ExitCode::from(130),
        Err(e) => {
            eprintln!(
                "torture: {e:#}; the instances' logs are in {}",
                logs.display()
            );
            ExitCode::FAILURE
        }
    }
}

/// Runs a campaign, and returns whether nothing was wrong; `None` if it was interrupted.
async fn torture(
    args: &Args,
    logs: &Path,
    stop: &CancellationToken,
) -> anyhow::Result<Option<bool>> {
    std::fs::create_dir_all(logs)?;
    println!(
        "seed {}: {} messages, {} instances, {} faults and {} kills",
        args.seed, args.messages, args.instances, args.faults, args.kills
    );
    let Some(campaign) = stop.run_until_cancelled(Campaign::begin(args, logs)).await else {
        return Ok(None);
    };
    let mut campaign = campaign?;
    println!("RabbitMQ {}, all queues quorum", campaign.rabbitmq);
    let judged = stop
        .run_until_cancelled(async {
            campaign.run(args).await?;
            campaign.judge().await
        })
        .await;
    if let Some(Ok(verdict)) = &judged
        && !verdict.lost.is_empty()
        && !args.brief
    {
        eprintln!("The queues in the end:\n{}", campaign.queues().await?);
    }
    let (faults, recovery) = campaign.summary(args.kills);
    campaign.end().await;
    let Some(verdict) = judged else {
        return Ok(None);
    };
    let verdict = verdict?;
    println!("faults, and the longest recovery: {faults}");
    tell(&verdict, recovery.as_secs_f64());
    Ok(Some(verdict.is_good()))
}

/// Runs a steady load, and returns the same.
async fn steady(
    args: &Args,
    time: Duration,
    logs: &Path,
    stop: &CancellationToken,
) -> anyhow::Result<Option<bool>> {
    std::fs::create_dir_all(logs)?;
    println!(
        "{} messages a second for {} s, {} instances",
        args.rate,
        time.as_secs(),
        args.instances
    );
    let begin = Steady::begin(args, time, logs);
    let Some(steady) = stop.run_until_cancelled(begin).await else {
        return Ok(None);
    };
    let mut steady = steady?;
    let outcome = stop.run_until_cancelled(steady.run()).await;
    steady.end().await;
    let Some(outcome) = outcome else {
        return Ok(None);
    };
    let outcome = outcome?;
    for line in &outcome.figures {
        println!("{line}");
    }
    list(&outcome.verdict);
    println!(
        "sent {}, lost {}, duplicated {}, unexpected {}, over bound {}, growing {}",
        outcome.verdict.attempted,
        outcome.verdict.lost.len(),
        outcome.verdict.duplicated,
        outcome.verdict.unexpected.len(),
        outcome.verdict.over_bound.len(),
        outcome.growing
    );
    Ok(Some(outcome.is_good()))
}

/// Runs a load on servers that take each other's place, and returns the same.
async fn failover(
    args: &Args,
    logs: &Path,
    stop: &CancellationToken,
) -> anyhow::Result<Option<bool>> {
    std::fs::create_dir_all(logs)?;
    let begin = Failover::begin(args, logs);
    let Some(failover) = stop.run_until_cancelled(begin).await else {
        return Ok(None);
    };
    let mut failover = failover?;
    let outcome = stop.run_until_cancelled(failover.run(args)).await;
    failover.end().await;
    let Some(outcome) = outcome else {
        return Ok(None);
    };
    let (verdict, still) = outcome?;
    list(&verdict);
    println!(
        "seed {}: {} kills, {}, longest standstill {:.1} s",
        args.seed,
        args.faults,
        counts(&verdict),
        still.as_secs_f64()
    );
    Ok(Some(verdict.is_good()))
}

/// Runs a load on instances of two versions that take each other's place, and returns the same.
async fn upgrade(
    args: &Args,
    old: &Path,
    new: &Path,
    logs: &Path,
    stop: &CancellationToken,
) -> anyhow::Result<Option<bool>> {
    std::fs::create_dir_all(logs)?;
    let begin = Upgrade::begin(args, old, new, logs);
    let Some(upgrade) = stop.run_until_cancelled(begin).await else {
        return Ok(None);
    };
    let mut upgrade = upgrade?;
    let outcome = stop.run_until_cancelled(upgrade.run(args)).await;
    upgrade.end().await;
    let Some(outcome) = outcome else {
        return Ok(None);
    };
    let (verdict, table) = outcome?;
    print!("{table}");
    list(&verdict);
    println!("{}", counts(&verdict));
    Ok(Some(verdict.is_good()))
}

/// Prints what is wrong.
fn list(verdict: &Verdict) {
    let bad = [
        ("lost", &verdict.lost),
        ("unexpected", &verdict.unexpected),
        ("over bound", &verdict.over_bound),
    ];
    for (kind, list) in bad {
        for what in list.iter().take(20) {
            println!("{kind}: {what}");
        }
    }
}

fn tell(verdict: &Verdict, recovery: f64) {
    list(verdict);
    println!("{}, recovery p95 {recovery:.1} s", counts(verdict));
}

fn counts(verdict: &Verdict) -> String {
    let duplicates = match (verdict.unexplained, verdict.slow) {
        (0, 0) => " (all at a fault)".into(),
        (0, slow) => format!(" (all at a fault, {slow} at a late confirm)"),
        _ => String::new(),
    };
    format!(
        "attempted {}, confirmed {}, lost {}, duplicated {}{duplicates}, unexpected {}, over bound {}",
        verdict.attempted,
        verdict.confirmed,
        verdict.lost.len(),
        verdict.duplicated,
        verdict.unexpected.len(),
        verdict.over_bound.len(),
    )
}
