//! `cargo dev bench --peers`: retry-scheduler measured beside other queues on Postgres.
//!
//! In reading order: [`peer`] has the queues, each driven by its own interface; [`adapter`] stands
//! between each of them and RabbitMQ; [`process`] runs the two in a process; [`contender`] lists all
//! that is compared; [`race`] and [`lateness`] measure; [`database`] is where; [`table`] shows it.

mod adapter;
mod contender;
mod database;
mod lateness;
mod peer;
mod process;
mod race;
mod table;

use std::{path::PathBuf, process::ExitCode, time::Instant};

use bench::{exit, field::Field, report::Report, scheduler::Setup, write};
use clap::Parser;

use crate::{
    contender::Contender, database::Database, peer::pg_boss, process::Kind, race::Measured,
};

/// Measure retry-scheduler beside other queues on Postgres.
///
/// Every queue gets the same messages from RabbitMQ and gives them back, through
/// the same adapter in a process of its own: deliveries in batches of up to 500,
/// one transaction for each batch, publishing with confirms. Each is started for
/// its race and stopped after it, in a random order in each round, so that it
/// runs alone. Shown are medians, and for the rate, in brackets, the least and
/// the most.
#[derive(Debug, Parser)]
#[command(
    name = "cargo dev bench --peers",
    bin_name = "cargo dev bench --peers",
    after_help = "\
The columns: CPU and WAL are those of one message. Own CPU and MB are those of
the contender's processes, the adapter included. Drift is how late a message
arrives that names its own due moment, at 200 a second.

Exit status: 0 when everything could be measured, whatever the numbers are; 1
when it could not, or when a message was lost or came twice.

It uses DATABASE_URL and RABBITMQ_URL, there only the database bench_peers and
the queues bench.*, and removes them when it ends. pg-boss and the Node that it
needs are installed with npm into cargo's target directory."
)]
struct Args {
    /// The full form: seven rounds of 20,000 messages instead of three of 5,000
    #[arg(long)]
    full: bool,
    /// Rounds [default: 3, in the full form 7]
    #[arg(long)]
    rounds: Option<usize>,
    /// Write everything that was measured, each round of it, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the table as Markdown
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Measure only these beside retry-scheduler
    #[arg(long, value_enum, value_name = "NAME", num_args = 1..)]
    only_peer: Vec<Contender>,
    /// Run as this peer; the benchmark starts itself with this option
    #[arg(long, hide = true)]
    serve: Option<Kind>,
    /// Run as the relay; the benchmark starts itself with this option
    #[arg(long, hide = true)]
    relay: Option<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(queue) = &args.relay {
        return exit(bench::floor::relay(queue).await);
    }
    if let Some(kind) = args.serve {
        return exit(kind.serve().await);
    }
    tokio::select! {
        ended = Box::pin(compare(args)) => exit(ended),
        () = testkit::interrupted() => ExitCode::from(130),
    }
}

async fn compare(args: Args) -> anyhow::Result<()> {
    let started = Instant::now();
    let mut contenders = Contender::chosen(&args.only_peer);
    let boss = Contender::Peer(Kind::PgBoss);
    if contenders.contains(&boss) && !pg_boss::install()? {
        println!("pg-boss is skipped, because there is no npm");
        contenders.retain(|one| *one != boss);
    }
    let mut setup = Setup::from_environment(None, &[])?;
    let mut database = Database::create(&setup).await?;
    setup.database_url = database.url.clone();
    let mut field = Field::open(setup, args.full, args.rounds).await?;
    let mut report = Report::new(&field, args.full);
    let measured = race::all(&mut field, &mut database, contenders).await;
    let closed = field.close().await;
    database.remove().await?;
    closed?;
    let measured = measured?;
    report.took(started.elapsed());
    show(&args, report, &measured)
}

fn show(args: &Args, mut report: Report, measured: &[Measured]) -> anyhow::Result<()> {
    report.add(table::aims(measured));
    print!("{}\n{}", report.table(), table::text(measured));
    if let Some(path) = &args.markdown {
        let text = format!("{}\n{}", report.markdown(), table::markdown(measured));
        write(path, &text)?;
    }
    if let Some(path) = &args.json {
        report.add(table::everything(measured));
        write(path, &format!("{:#}\n", report.json()))?;
    }
    Ok(())
}
