//! A test's own database and queues, and the service that runs on them.

use std::{collections::HashMap, net::SocketAddr, process::Stdio, time::Duration};

use devstack::Stack;
use retry_scheduler::{
    app::{App, instance_name},
    config::Settings,
};
use sqlx::{AssertSqlSafe, PgPool, postgres::PgPoolOptions};
use testkit::Proxy;
use tokio::{sync::oneshot, task::JoinHandle};
use uuid::Uuid;

use super::{Client, Scrape, eventually};

/// A database, queue names and settings that no other test has.
pub struct Bed {
    /// The test's own connections to the database.
    pub db: PgPool,
    pub client: Client,
    env: HashMap<String, String>,
    prefix: String,
}

impl Bed {
    /// A bed on the Postgres and RabbitMQ that all tests share.
    pub async fn new() -> Self {
        Self::on(super::shared().await).await
    }

    /// A bed on the given Postgres and RabbitMQ.
    pub async fn on(stack: &Stack) -> Self {
        let prefix = format!("t{}", Uuid::new_v4().simple());
        let database_url = tokio::task::block_in_place(|| stack.postgres.create_database(&prefix))
            .expect("a database");
        Self::at(&database_url, &stack.rabbitmq.url(), prefix).await
    }

    /// A bed that reaches Postgres and RabbitMQ at these addresses.
    pub async fn at(database_url: &str, rabbitmq_url: &str, prefix: String) -> Self {
        let db = PgPoolOptions::new()
            .max_connections(4)
            .connect(database_url)
            .await
            .expect("the test connects to Postgres");
        let client = Client::connect(rabbitmq_url).await;
        let mut bed = Self {
            db,
            client,
            env: HashMap::new(),
            prefix,
        };
        bed.set("DATABASE_URL", database_url);
        bed.set("RABBITMQ_URL", rabbitmq_url);
        bed.set("RETRY_QUEUE", &bed.queue("retry.scheduled"));
        bed.set("MANUAL_REVIEW_QUEUE", &bed.queue("manual-review.pending"));
        bed.set("HTTP_HOST", "127.0.0.1");
        bed.set("HTTP_PORT", "0");
        // The delays are short enough for tests, and long enough to tell early from late.
        bed.set("BASE_DELAY_MS", "200");
        bed.set("MAX_DELAY_MS", "1000");
        bed.set("JITTER_MS", "50");
        bed.set("LOG_FORMAT", "json");
        bed
    }

    /// Changes a setting for instances that are started from now on.
    pub fn set(&mut self, name: &str, value: &str) -> &mut Self {
        self.env.insert(name.to_owned(), value.to_owned());
        self
    }

    pub fn setting(&self, name: &str) -> &str {
        &self.env[name]
    }

    /// The full name of a queue, with this test's prefix.
    pub fn queue(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub fn intake(&self) -> String {
        self.setting("RETRY_QUEUE").to_owned()
    }

    pub fn review(&self) -> String {
        self.setting("MANUAL_REVIEW_QUEUE").to_owned()
    }

    /// Declares a durable queue with this test's prefix, and returns its full name.
    pub async fn declare(&self, name: &str) -> String {
        let queue = self.queue(name);
        self.client.declare(&queue).await;
        queue
    }

    /// The settings of an instance that is started now.
    pub fn settings(&self) -> Settings {
        Settings::load(None, |name| self.env.get(name).cloned()).expect("the test's settings")
    }

    /// Starts the service in this process, and does not wait until it is ready.
    pub async fn start_unready(&self) -> Running {
        let instance = instance_name(&self.settings());
        let app = App::new(self.settings(), &instance)
            .await
            .expect("the service is built");
        let address = app.address().expect("an address");
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(app.run(async move {
            let _ = stopped.await;
        }));
        Running {
            address,
            stop: Some(stop),
            task,
        }
    }

    /// Starts the service in this process, and waits until it is ready.
    pub async fn start(&self) -> Running {
        let running = self.start_unready().await;
        running.until_ready().await;
        running
    }

    /// Starts the compiled binary, discards its log, and does not wait until it is ready.
    pub fn spawn(&self) -> tokio::process::Child {
        self.command()
            .arg("serve")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts")
    }

    /// A command for the compiled binary, with this bed's settings as its environment.
    /// Only the variables of a coverage run are passed on.
    pub fn command(&self) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_retry-scheduler"));
        command
            .env_clear()
            .envs(std::env::vars().filter(|(name, _)| name.starts_with("LLVM_PROFILE")))
            .envs(&self.env)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Creates the tables, for tests that need them before a service runs.
    pub async fn migrate(&self) {
        let store = retry_scheduler::store::Store::open(&self.settings(), "test").expect("a store");
        store.migrate().await.expect("migrations apply");
    }

    /// Puts a proxy between Postgres and the instances that are started from now on. The
    /// test's own connections do not go through it.
    pub async fn proxy_postgres(&mut self) -> Proxy {
        let direct = self.setting("DATABASE_URL").to_owned();
        let port = url::Url::parse(&direct).expect("a URL").port();
        let proxy = Proxy::to(port.expect("a port")).await.expect("a proxy");
        self.set("DATABASE_URL", &proxy.by_way(&direct).expect("a URL"));
        proxy
    }

    /// Inserts `n` rows that are due now, without a way through the broker.
    pub async fn insert_due(&self, queue: &str, n: i32) {
        sqlx::query(
            "INSERT INTO retry_queue (message_id, original_payload, original_queue, next_retry_at)
             SELECT gen_random_uuid(), convert_to('job ' || i, 'UTF8'), $1, now()
             FROM generate_series(1, $2) AS i",
        )
        .bind(queue)
        .bind(n)
        .execute(&self.db)
        .await
        .expect("rows are stored");
    }

    /// Makes all pending rows due now.
    pub async fn make_due(&self) {
        sqlx::query("UPDATE retry_queue SET next_retry_at = now() WHERE status = 'pending'")
            .execute(&self.db)
            .await
            .expect("rows fall due");
    }

    /// Has the running service take in so many messages for review that it may hold `window`
    /// deliveries from now on, and forgets those messages. A subscription begins with one.
    pub async fn widen(&self, window: usize) {
        let mut taken = 0;
        let mut size = 1;
        while size < window {
            let needed = size + 4 * size;
            for _ in taken..needed {
                let none = lapin::BasicProperties::default();
                self.client.publish(&self.intake(), b"widen", none).await;
            }
            (taken, size) = (needed, 4 * size);
        }
        let reviewed = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";
        eventually("the window is wide enough", || async {
            (self.count(reviewed).await == taken as i64).then_some(())
        })
        .await;
        self.arrange("DELETE FROM retry_queue; DELETE FROM retry_history")
            .await;
        let channel = self.client.channel().await;
        let purge = channel.queue_purge(self.review().into(), Default::default());
        purge.await.expect("review is emptied");
    }

    /// Inserts one row that is due now, without a way through the broker; returns its
    /// message's id.
    pub async fn insert_one(&self, queue: &str, payload: &[u8]) -> Uuid {
        let id = Uuid::now_v7();
        sqlx::query(
            "INSERT INTO retry_queue (message_id, original_payload, original_queue)
             VALUES ($1, $2, $3)",
        )
        .bind(id)
        .bind(payload)
        .bind(queue)
        .execute(&self.db)
        .await
        .expect("a row");
        id
    }

    /// The number that a query returns.
    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql)
            .fetch_one(&self.db)
            .await
            .expect("a count")
    }

    /// Waits until a query returns `wanted`.
    pub async fn until_count(&self, sql: &'static str, wanted: i64) {
        eventually(&format!("{sql} = {wanted}"), || async {
            (self.count(sql).await == wanted).then_some(())
        })
        .await;
    }

    /// Runs statements one by one, because some, such as VACUUM, cannot be part of a
    /// transaction.
    pub async fn arrange(&self, statements: &str) {
        for statement in statements.split(';').filter(|s| !s.trim().is_empty()) {
            sqlx::raw_sql(AssertSqlSafe(statement.to_owned()))
                .execute(&self.db)
                .await
                .expect("arranged");
        }
    }

    /// Installs a trigger that notes, at every write to `retry_queue`, which value a setting
    /// of Postgres has for the writer.
    pub async fn witness(&self, setting: &str) {
        sqlx::raw_sql(AssertSqlSafe(format!(
            "CREATE TABLE witness (what TEXT, setting TEXT);
             CREATE FUNCTION testify() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 INSERT INTO witness VALUES (TG_OP, current_setting('{setting}'));
                 RETURN NULL;
             END $$;
             CREATE TRIGGER testify AFTER INSERT OR UPDATE ON retry_queue
                 FOR EACH ROW EXECUTE FUNCTION testify();"
        )))
        .execute(&self.db)
        .await
        .expect("a witness");
    }

    /// What the trigger of [`Bed::witness`] has noted: the kind of each write, and the value.
    pub async fn witnessed(&self) -> Vec<(String, String)> {
        sqlx::query_as("SELECT what, setting FROM witness")
            .fetch_all(&self.db)
            .await
            .expect("witnesses")
    }
}

/// An instance of the service that runs in the test's process.
pub struct Running {
    /// Where the service answers HTTP.
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Running {
    /// Asks the service to stop, and waits until it has.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        tokio::time::timeout(Duration::from_secs(60), self.task)
            .await
            .expect("it stops in time")
            .expect("it does not panic")
            .expect("it stops cleanly");
    }

    /// Ends the service without asking it to stop. Inside a process, this is as near to a
    /// crash as it gets.
    pub async fn abort(self) {
        self.task.abort();
        let _ = self.task.await;
    }

    /// Sends `GET path`, and returns the status and the body of the answer.
    pub async fn get(&self, path: &str) -> (u16, String) {
        testkit::get(self.address, path).await.expect("an answer")
    }

    /// Whether `/ready` answers with 200, and its body.
    pub async fn ready(&self) -> (bool, serde_json::Value) {
        let (status, body) = self.get("/ready").await;
        (status == 200, serde_json::from_str(&body).expect("JSON"))
    }

    /// Waits until `/ready` answers with 200.
    pub async fn until_ready(&self) {
        eventually("the service is ready", || async {
            self.ready().await.0.then_some(())
        })
        .await;
    }

    /// Waits until `/ready` lists a part as down whose name starts with `part`.
    pub async fn until_down(&self, part: &str) {
        eventually(&format!("{part} is down"), || async {
            let (_, body) = self.ready().await;
            let down = body["down"].as_array().expect("a list");
            down.iter()
                .any(|d| d.as_str().is_some_and(|d| d.starts_with(part)))
                .then_some(())
        })
        .await;
    }

    pub async fn scrape(&self) -> Scrape {
        let (status, body) = self.get("/metrics").await;
        assert_eq!(status, 200);
        Scrape::parse(&body)
    }
}
