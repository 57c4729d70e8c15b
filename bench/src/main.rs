//! `cargo dev bench`: retry-scheduler measured against what the broker can do
//! without it.
//!
//! What it is made of is in the library; this is the command line.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use bench::{
    exit,
    field::Field,
    floor, plot,
    report::Report,
    scenarios::{Scenario, versus},
    scheduler::Setup,
    write,
};
use clap::Parser;

/// Measure retry-scheduler: how fast, how punctual, how large.
///
/// Runs the release binary as its own process between a real RabbitMQ and a
/// real Postgres. Each scenario is measured against its own floor in the same
/// run, taking turns, for several rounds: the ratio of the two says more than a
/// rate, which depends on the machine and on what else it does. Shown are the
/// median and, in brackets, the least and the most; "reach" is the aim.
#[derive(Debug, Parser)]
#[command(
    name = "cargo dev bench",
    bin_name = "cargo dev bench",
    after_help = "\
Examples:
  cargo dev bench                                 the quick form: under three minutes
  cargo dev bench --full --json b.json --plot b.svg
                                                  all of it: an hour or more, some 20 GB of disk
  cargo dev bench --only throughput --rounds 9    one scenario, more rounds
  cargo dev bench --set DISPATCH_WORKERS=4        another setting
  cargo dev bench --versus DISPATCH_WORKERS=4 --versus /tmp/old/retry-scheduler
                                                  two changes, each against none, in one run
  cargo dev bench --peers                         beside other queues on Postgres; it has
                                                  options of its own: --peers --help

The floors:
  relay    consumes, publishes with confirms, acknowledges: the same queues,
           connections, batches and messages, but no database
  TTL/DLX  a RabbitMQ queue whose messages expire into their target queue

Exit status: 0 when everything could be measured, whatever the numbers are; 1
when it could not, or when a message was lost or came twice.

It uses DATABASE_URL and RABBITMQ_URL, there only the schemas bench_* and the
queues bench.*, and removes them when it ends."
)]
struct Args {
    /// The full form: larger, longer, more scenarios
    #[arg(long)]
    full: bool,
    /// Run only this scenario; may be given several times
    #[arg(long, value_enum, value_name = "NAME")]
    only: Vec<Scenario>,
    /// Rounds of each scenario [default: 2 to 5, in the full form 7]
    #[arg(long)]
    rounds: Option<usize>,
    /// Write everything that was measured, each round of it, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the findings as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Write the table as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Measure nothing but this change against none: NAME=VALUE,..., a binary's
    /// path, or sql:STATEMENT for the tables; may be given several times
    #[arg(long, value_name = "CHANGE", conflicts_with = "only")]
    versus: Vec<String>,
    /// With --versus: over how many target queues the messages are spread
    #[arg(long, value_name = "N", default_value_t = 1, requires = "versus",
          value_parser = clap::value_parser!(u32).range(1..))]
    targets: u32,
    /// A setting of retry-scheduler, for all scenarios
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// The retry-scheduler to measure [default: the one built beside this program]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Run as the relay; the benchmark starts itself with this option
    #[arg(long, hide = true, num_args = 1)]
    relay: Option<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(queue) = &args.relay {
        return exit(floor::relay(queue).await);
    }
    tokio::select! {
        ended = measure(args) => exit(ended),
        () = testkit::interrupted() => ExitCode::from(130),
    }
}

async fn measure(args: Args) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut chosen = Scenario::chosen(&args.only, args.full);
    let setup = Setup::from_environment(args.binary.as_deref(), &args.set)?;
    let mut field = Field::open(setup, args.full, args.rounds).await?;
    let mut report = Report::new(&field, args.full);
    if !args.versus.is_empty() {
        chosen.clear();
        report.add(versus::run(&mut field, &args.versus, args.targets).await?);
    }
    let mut failed = None;
    for scenario in chosen {
        match scenario.run(&mut field).await {
            Ok(findings) => report.add(findings),
            Err(e) => {
                failed = Some(e.context(format!("scenario {}", scenario.name())));
                break;
            }
        }
    }
    // Show what was measured even if a later scenario failed: a full run takes very long.
    let closed = field.close().await;
    report.took(started.elapsed());
    print!("{}", report.table());
    if let Some(path) = &args.json {
        write(path, &format!("{:#}\n", report.json()))?;
    }
    if let Some(path) = &args.plot {
        write(path, &plot::svg(&report))?;
    }
    if let Some(path) = &args.markdown {
        write(path, &report.markdown())?;
    }
    failed.map_or(closed, Err)
}
