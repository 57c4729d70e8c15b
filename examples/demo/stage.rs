//! Starts all parts of the demo, runs them, reports, and stops them.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};
use lapin::Connection;
use retry_scheduler::{
    app::{App, instance_name},
    config::Settings,
};
use secrecy::ExposeSecret;
use testkit::amqp;
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{Instant, interval, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use url::Url;

use crate::{
    Args,
    ledger::Ledger,
    rows::{Row, Rows, SCHEMA},
    screen::{Screen, View, put},
    services::{self, INTAKE, REVIEW, SERVICES},
};

/// The retries of a message wait 1.5, 3 and 6 s, each up to half a second longer. That is
/// short enough for a demo of a minute to show some messages from beginning to end.
const SETTINGS: [(&str, &str); 9] = [
    ("SERVICE_NAME", "retry-scheduler-demo"),
    ("HTTP_HOST", "127.0.0.1"),
    ("RETRY_QUEUE", INTAKE),
    ("MANUAL_REVIEW_QUEUE", REVIEW),
    ("DEFAULT_MAX_RETRIES", "3"),
    ("BASE_DELAY_MS", "1500"),
    ("MAX_DELAY_MS", "8000"),
    ("JITTER_MS", "500"),
    ("SHUTDOWN_TIMEOUT_MS", "5000"),
];

/// How often the screen is drawn.
const FRAME: Duration = Duration::from_millis(250);

/// How long to wait for the last messages to end: at least twice as long as one can take.
const SETTLING: Duration = Duration::from_secs(30);

/// How long to wait for the service to be ready.
const STARTING: Duration = Duration::from_secs(30);

/// The running parts of the demo.
pub struct Stage {
    rows: Rows,
    counted: [Row; SERVICES.len()],
    ledger: Arc<Ledger>,
    /// The connection of the simulated services.
    broker: Arc<Connection>,
    /// The connection that reads the review queue. When it is closed, RabbitMQ puts the
    /// unacknowledged messages back into the queue.
    reviewing: Arc<Connection>,
    programs: JoinSet<anyhow::Result<()>>,
    app: JoinHandle<anyhow::Result<()>>,
    app_stop: CancellationToken,
    address: SocketAddr,
    screen: Screen,
}

impl Stage {
    /// Cleans up after the last demo, then starts retry-scheduler and the simulated
    /// services.
    pub async fn set() -> anyhow::Result<Self> {
        let settings = settings()?;
        let broker = connect(&settings).await?;
        let rows = Rows::open(settings.database_url.expose_secret()).await?;
        services::prepare(&broker).await?;
        let reviewing = connect(&settings).await?;

        let instance = instance_name(&settings);
        let app = App::new(settings, &instance).await?;
        let address = app.address()?;
        let app_stop = CancellationToken::new();
        let app = tokio::spawn(app.run(app_stop.clone().cancelled_owned()));
        until_ready(address).await?;

        let ledger = Arc::new(Ledger::default());
        let mut programs = JoinSet::new();
        programs.spawn(services::review(reviewing.clone(), ledger.clone()));
        for (index, service) in SERVICES.iter().enumerate() {
            if service.consumes() {
                programs.spawn(services::serve(broker.clone(), ledger.clone(), index));
            }
        }
        Ok(Self {
            rows,
            counted: [Row::default(); SERVICES.len()],
            ledger,
            broker,
            reviewing,
            programs,
            app,
            app_stop,
            address,
            screen: Screen::new(),
        })
    }

    /// Sends messages, and shows what becomes of them until all have ended or the time
    /// for that is over.
    pub async fn play(&mut self, args: &Args) -> anyhow::Result<()> {
        let time = Duration::from_secs(args.seconds.into());
        let (broker, ledger) = (self.broker.clone(), self.ledger.clone());
        self.programs
            .spawn(services::produce(broker, ledger, args.rate, time));
        let start = Instant::now();
        let mut settling: Option<Instant> = None;
        let mut frames = interval(FRAME);
        loop {
            tokio::select! {
                _ = frames.tick() => {}
                // Only the producer ends without an error; after it, nothing more is sent.
                Some(ended) = self.programs.join_next() => {
                    ended?.context("a simulated service failed")?;
                    settling = Some(Instant::now());
                }
                ended = &mut self.app => {
                    ended.context("the service panicked")??;
                    bail!("the service ended");
                }
            }
            self.look().await?;
            let open = self.ledger.open();
            let doing = match settling {
                None => format!(
                    "sending {}/s, {} of {} s",
                    args.rate,
                    start.elapsed().as_secs(),
                    args.seconds
                ),
                Some(_) => format!("sent all, {open} to go"),
            };
            let title = match self.screen {
                Screen::Terminal { .. } => {
                    let address = self.address;
                    format!("retry-scheduler demo: {doing}; http://{address}/metrics")
                }
                Screen::Lines { .. } => doing,
            };
            let view = self.view(title);
            self.screen.draw(&view, self.ledger.take_told())?;
            match settling {
                Some(_) if open == 0 => return Ok(()),
                // The report names what has not ended by now.
                Some(since) if since.elapsed() > SETTLING => return Ok(()),
                _ => {}
            }
        }
    }

    async fn look(&mut self) -> anyhow::Result<()> {
        let lost = "the demo lost Postgres";
        self.rows.tell(&self.ledger).await.context(lost)?;
        self.counted = self.rows.count().await.context(lost)?;
        Ok(())
    }

    pub fn clear(&mut self) -> std::io::Result<()> {
        self.screen.clear()
    }

    /// Prints the table as it stands when the demo is interrupted.
    pub fn so_far(&self) -> std::io::Result<()> {
        let table = self.view(String::new()).table().join("\n");
        put(&format!("Interrupted; so far:\n\n{table}\n"))
    }

    fn view(&self, title: String) -> View {
        View {
            title,
            counts: self.ledger.counts(),
            rows: self.counted,
        }
    }

    /// Prints the final table, whether it adds up, and where to look next. An error if it
    /// does not add up.
    pub async fn report(&mut self) -> anyhow::Result<()> {
        self.programs.shutdown().await;
        let _ = self.reviewing.close(200, "read".into()).await;
        let reviewed: usize = self.ledger.counts().iter().map(|c| c.reviewed).sum();
        let mut in_queue = 0;
        for _ in 0..20 {
            // RabbitMQ puts the messages back a moment after the connection is closed.
            in_queue = services::in_review_queue(&self.broker).await? as usize;
            if in_queue >= reviewed {
                break;
            }
            sleep(FRAME).await;
        }
        // A row is settled a moment after its message has arrived.
        let mut faults = Vec::new();
        for _ in 0..20 {
            self.look().await?;
            faults = self.ledger.faults(&self.counted, in_queue);
            if faults.is_empty() {
                break;
            }
            sleep(FRAME).await;
        }
        let table = self.view(String::new()).table().join("\n");
        put(&format!("\n{table}\n\n"))?;
        if !faults.is_empty() {
            let shown = faults.len().min(20);
            for fault in &faults[..shown] {
                eprintln!("  {fault}");
            }
            bail!("{} things do not add up", faults.len());
        }
        put(&format!(
            "It adds up: every message is done or in review once, with its own body, as the\n\
             services, Postgres and RabbitMQ have it; {reviewed} wait on {REVIEW}.\n"
        ))?;
        if let Some((id, lines)) = self.rows.one_history().await? {
            let label = self.ledger.label(id);
            let lines = lines.join("\n");
            put(&format!(
                "\nThe way of {label}, from its first failure:\n{lines}\n"
            ))?;
        }
        put(&format!(
            "\nAll of it stays until the next demo. To look at it, `cargo dev up` starts both\n\
             again and prints how to reach them; then in psql:\n\
             \x20 SELECT original_queue, status, reason FROM {SCHEMA}.retry_queue;\n\
             \x20 SELECT * FROM {SCHEMA}.retry_events ORDER BY id DESC LIMIT 20;\n\
             README.md tells how to use it for your own queues.\n"
        ))?;
        Ok(())
    }

    /// Stops the simulated services, closes their connections, then stops retry-scheduler.
    pub async fn strike(mut self) -> anyhow::Result<()> {
        self.programs.shutdown().await;
        let closing = async {
            let _ = self.reviewing.close(200, "demo over".into()).await;
            let _ = self.broker.close(200, "demo over".into()).await;
        };
        let _ = timeout(Duration::from_secs(2), closing).await;
        self.app_stop.cancel();
        if !self.app.is_finished() {
            self.app.await.context("the service panicked")??;
        }
        Ok(())
    }
}

/// The settings of the demo's retry-scheduler: [`SETTINGS`], with the addresses and the
/// port from the environment.
fn settings() -> anyhow::Result<Settings> {
    let url = std::env::var("DATABASE_URL").unwrap_or_default();
    ensure!(
        !url.is_empty(),
        "DATABASE_URL and RABBITMQ_URL say where to run; `cargo dev demo` sets them"
    );
    let mut url = Url::parse(&url).context("DATABASE_URL")?;
    url.query_pairs_mut()
        .append_pair("options[search_path]", SCHEMA);
    let settings = Settings::load(None, |name| match name {
        "DATABASE_URL" => Some(url.to_string()),
        "RABBITMQ_URL" => std::env::var(name).ok(),
        "HTTP_PORT" => std::env::var(name).ok().or_else(|| Some("0".into())),
        _ => {
            let own = SETTINGS.iter().find(|(own, _)| *own == name);
            own.map(|(_, value)| (*value).to_owned())
        }
    })?;
    Ok(settings)
}

async fn connect(settings: &Settings) -> anyhow::Result<Arc<Connection>> {
    let url = settings.rabbitmq_url.expose_secret();
    let connection = amqp::connect(url, "demo").await.context("RABBITMQ_URL")?;
    Ok(Arc::new(connection))
}

/// Asks `/ready` until it answers with 200.
async fn until_ready(address: SocketAddr) -> anyhow::Result<()> {
    let deadline = Instant::now() + STARTING;
    loop {
        let (status, body) = testkit::get(address, "/ready").await?;
        if status == 200 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "the service is not ready: {body}"
        );
        sleep(FRAME).await;
    }
}
