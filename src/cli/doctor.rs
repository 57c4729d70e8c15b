//! `doctor`: whether the set-up can lose messages.

use std::process::ExitCode;

use clap::Args;

use crate::{
    app,
    broker::Broker,
    config::{ConfigError, Settings},
    doctor::{Grade, Report},
    domain::queues::name_problem,
    store::Store,
};

/// The exit status for settings that cannot be used, which is also that for such arguments.
const UNUSABLE: u8 = 2;

#[derive(Debug, Args)]
#[command(after_help = "\
Each finding is one line with its cure:
  problem  messages can be lost or doubled, or nothing works
  warning  nothing is lost by this alone
  unknown  it could not be asked, and why
  ok       as it should be

Queue arguments, policies and bindings are told only by RabbitMQ's management API, with the user
of RABBITMQ_URL, who needs the tag monitoring: see RABBITMQ_MANAGEMENT_URL. What it tells may be
some seconds old.

It changes nothing, but for what the service itself would do: it declares the exchange by which
republished messages keep their routing key, and binds the queues of --queue to it.

--probe QUEUE publishes a message to that queue, takes and rejects it, sees it arrive in
DEAD_LETTER_QUEUE, sends it back as the service would, and rejects it again. The queue must be
empty and without consumers. If the service runs on this database, its task is the proof, and is
removed; else DEAD_LETTER_QUEUE must be empty too.

Exit status: 0 when there is no problem, 1 when there is one, 2 when the arguments or the settings
cannot be used.")]
pub(super) struct Doctor {
    /// A queue of your own that messages go back to; repeat it for more.
    #[arg(long = "queue", value_name = "QUEUE", value_parser = queue_name)]
    queues: Vec<String>,
    /// Try the dead-letter loop of this queue with a probe message; repeat it for more.
    #[arg(long = "probe", value_name = "QUEUE", value_parser = queue_name)]
    probes: Vec<String>,
    /// The routing key that your producers use for the probed queue; its name if you leave it out.
    #[arg(long, value_name = "KEY", requires = "probes")]
    routing_key: Option<String>,
    /// Print JSON, for programs.
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(super) async fn run(self, settings: Result<Settings, ConfigError>) -> ExitCode {
        match Box::pin(self.examine(settings)).await {
            Ok(report) => {
                match serde_json::to_string_pretty(&report) {
                    Ok(json) if self.json => println!("{json}"),
                    _ => print!("{report}"),
                }
                if report.count(Grade::Problem) > 0 {
                    ExitCode::FAILURE
                } else {
                    ExitCode::SUCCESS
                }
            }
            Err(e) => {
                eprintln!("retry-scheduler: {e:#}");
                UNUSABLE.into()
            }
        }
    }

    /// Fails only when the settings cannot be used.
    async fn examine(&self, settings: Result<Settings, ConfigError>) -> anyhow::Result<Report> {
        let settings = settings?;
        let book = app::policy_book(&settings)?;
        let broker = Broker::new(&settings)?;
        let store = Store::open(&settings, "doctor")?;
        // A queue that is probed is examined, too.
        let mut queues = self.queues.clone();
        queues.extend(self.probes.iter().cloned());
        queues.sort();
        queues.dedup();
        let doctor = crate::doctor::Doctor::new(settings, book, broker, store, queues)?;
        let mut report = doctor.examine().await;
        for queue in &self.probes {
            let finding = doctor.probe(queue, self.routing_key.as_deref()).await;
            report.findings.push(finding);
        }
        Ok(report)
    }
}

fn queue_name(name: &str) -> Result<String, String> {
    match name_problem(name) {
        Some(problem) => Err(format!("the queue name {problem}")),
        None => Ok(name.to_owned()),
    }
}
