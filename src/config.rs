//! Settings: defaults, then an optional TOML file, then the environment.
//!
//! [`SETTINGS`] is the one list of what can be set; `.env.example` and the
//! README's table are tested against it.

use std::{fmt, net::IpAddr, path::Path, time::Duration};

use config::{Config, File, FileFormat, Value, ValueKind};
use globset::{Glob, GlobSet, GlobSetBuilder};
use lapin::uri::AMQPUri;
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use url::Url;

/// One setting as a user meets it.
pub struct Setting {
    /// The environment variable; lower-cased, the key in the TOML file.
    pub name: &'static str,
    /// What holds when nothing is set.
    pub default: &'static str,
    /// One sentence for people.
    pub help: &'static str,
}

const fn setting(name: &'static str, default: &'static str, help: &'static str) -> Setting {
    Setting {
        name,
        default,
        help,
    }
}

/// Every setting there is, in the order they are documented.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    setting("SERVICE_NAME", "retry-scheduler", "Names this service in logs, broker connections and the `x-retry-scheduler` header."),
    setting("HTTP_HOST", "0.0.0.0", "Address the HTTP server listens on."),
    setting("HTTP_PORT", "8086", "Port of the HTTP server; 0 takes any free one."),
    setting("RABBITMQ_URL", "amqp://localhost:5672", "Broker, as `amqp://` or `amqps://`."),
    setting("RETRY_QUEUE", "retry.scheduled", "Intake queue of RetryMessages; declared durable when absent."),
    setting("MANUAL_REVIEW_QUEUE", "manual-review.pending", "Where messages go that people must look at; declared durable when absent."),
    setting("REVIEW_FORMAT", "json", "Body of review messages: `json` or `protobuf`."),
    setting("ALLOWED_QUEUES", "", "Comma-separated globs of queues a message may go back to; empty allows all but our own and `amq.*`."),
    setting("DEFAULT_MAX_RETRIES", "3", "Retries of a message that does not say its own number."),
    setting("BASE_DELAY_MS", "2000", "Wait before the first retry; it doubles with each further one."),
    setting("MAX_DELAY_MS", "60000", "Longest wait between retries, before jitter."),
    setting("JITTER_MS", "1000", "A random 0 to this is added to each wait."),
    setting("MAX_AGE_MS", "604800000", "A message older than this goes to review whatever its count."),
    setting("RETRY_POLL_INTERVAL_MS", "1000", "Longest sleep of the dispatcher; it wakes earlier for what falls due."),
    setting("DATABASE_URL", "postgresql://localhost:5432/retry_scheduler", "Postgres, as `postgresql://`."),
    setting("DATABASE_POOL_SIZE", "8", "Connections to Postgres."),
    setting("DATABASE_TIMEOUT_MS", "15000", "Deadline of one database operation."),
    setting("MIGRATE_ON_START", "true", "Apply migrations when serving starts."),
    setting("INTAKE_PREFETCH", "1000", "Unacknowledged messages the broker may hand us."),
    setting("INTAKE_BATCH", "500", "Most messages stored in one transaction."),
    setting("INTAKE_LINGER_MS", "5", "How long a batch waits for more once it has its first message."),
    setting("DISPATCH_WORKERS", "2", "Batches in flight at once, each on its own connection."),
    setting("DISPATCH_BATCH", "500", "Most messages republished in one transaction."),
    setting("DISPATCH_BATCH_BYTES", "8388608", "Most payload bytes in one such batch; one message always fits."),
    setting("CONFIRM_TIMEOUT_MS", "10000", "How long a published batch waits for the broker's confirms before it is rolled back."),
    setting("BROKER_TIMEOUT_MS", "5000", "Deadline of connecting, declaring, acknowledging and closing."),
    setting("BROKER_HEARTBEAT_SECONDS", "10", "AMQP heartbeat; a frozen broker is noticed after two."),
    setting("MAX_PAYLOAD_BYTES", "16777216", "A larger original payload is not retried but goes to review."),
    setting("METRICS_MAX_QUEUES", "100", "Queues with a metric label of their own; the rest share `other`."),
    setting("SHUTDOWN_TIMEOUT_MS", "20000", "Deadline for a clean stop."),
    setting("LOG_LEVEL", "info", "tracing filter, such as `info` or `retry_scheduler=debug`."),
    setting("LOG_FORMAT", "auto", "`json`, `pretty`, or `auto`: pretty on a terminal."),
];

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Pretty on a terminal, JSON elsewhere.
    Auto,
    /// One JSON object a line.
    Json,
    /// For people.
    Pretty,
}

/// How review messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReviewFormat {
    /// proto3 JSON.
    Json,
    /// Protobuf.
    Protobuf,
}

/// The queues a message may go back to.
#[derive(Clone, Debug)]
pub struct AllowedQueues {
    own: [String; 2],
    allowed: Option<GlobSet>,
}

impl AllowedQueues {
    /// Why `queue` may not be published to, if it may not.
    pub fn refusal(&self, queue: &str) -> Option<&'static str> {
        if self.own.iter().any(|own| own == queue) {
            Some("it is one of the scheduler's own queues")
        } else if queue.starts_with("amq.") {
            Some("names beginning with amq. belong to the broker")
        } else if self
            .allowed
            .as_ref()
            .is_some_and(|set| !set.is_match(queue))
        {
            Some("it is not among ALLOWED_QUEUES")
        } else {
            None
        }
    }
}

/// All settings, parsed and checked.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each field is documented by its entry in SETTINGS
pub struct Settings {
    pub service_name: String,
    pub http_host: IpAddr,
    pub http_port: u16,
    pub rabbitmq_url: SecretString,
    pub retry_queue: String,
    pub manual_review_queue: String,
    pub review_format: ReviewFormat,
    pub allowed_queues: AllowedQueues,
    pub default_max_retries: i32,
    pub base_delay: Duration,
    pub max_delay: Duration,
    pub jitter: Duration,
    pub max_age: Duration,
    pub retry_poll_interval: Duration,
    pub database_url: SecretString,
    pub database_pool_size: u32,
    pub database_timeout: Duration,
    pub migrate_on_start: bool,
    pub intake_prefetch: u16,
    pub intake_batch: usize,
    pub intake_linger: Duration,
    pub dispatch_workers: usize,
    pub dispatch_batch: usize,
    pub dispatch_batch_bytes: usize,
    pub confirm_timeout: Duration,
    pub broker_timeout: Duration,
    pub broker_heartbeat_seconds: u16,
    pub max_payload_bytes: usize,
    pub metrics_max_queues: usize,
    pub shutdown_timeout: Duration,
    pub log_level: String,
    pub log_format: LogFormat,
    effective: Vec<(&'static str, String)>,
}

/// A setting that cannot be used: one line that names it.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{name}: {problem}")]
pub struct ConfigError {
    name: String,
    problem: String,
}

impl ConfigError {
    fn new(name: impl Into<String>, problem: impl fmt::Display) -> Self {
        Self {
            name: name.into(),
            problem: problem.to_string().replace('\n', " "),
        }
    }
}

impl Settings {
    /// Reads the file, if one is named, and the environment through `env`.
    pub fn load(
        file: Option<&Path>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let mut builder = Config::builder();
        for setting in SETTINGS {
            builder = builder
                .set_default(key(setting.name), setting.default)
                .map_err(|e| ConfigError::new(setting.name, e))?;
        }
        if let Some(path) = file {
            let source = read_file(path)?;
            builder = builder.add_source(source);
        }
        for setting in SETTINGS {
            builder = builder
                .set_override_option(key(setting.name), env(setting.name))
                .map_err(|e| ConfigError::new(setting.name, e))?;
        }
        let config = builder
            .build()
            .map_err(|e| ConfigError::new("configuration", e))?;
        Self::check(&Values(config))
    }

    fn check(values: &Values) -> Result<Self, ConfigError> {
        let retry_queue = values.queue("RETRY_QUEUE")?;
        let manual_review_queue = values.queue("MANUAL_REVIEW_QUEUE")?;
        if retry_queue == manual_review_queue {
            return Err(ConfigError::new(
                "MANUAL_REVIEW_QUEUE",
                "must differ from RETRY_QUEUE, or review would be retried",
            ));
        }
        let base_delay = values.millis("BASE_DELAY_MS", 1)?;
        let max_delay = values.millis("MAX_DELAY_MS", 1)?;
        if max_delay < base_delay {
            return Err(ConfigError::new(
                "MAX_DELAY_MS",
                "must not be below BASE_DELAY_MS",
            ));
        }
        let intake_prefetch = values.within("INTAKE_PREFETCH", 1..=u16::MAX)?;
        let intake_batch = values.within("INTAKE_BATCH", 1..=10_000)?;
        Ok(Self {
            service_name: values.text("SERVICE_NAME")?,
            http_host: values.parsed("HTTP_HOST")?,
            http_port: values.parsed("HTTP_PORT")?,
            rabbitmq_url: values.amqp_url("RABBITMQ_URL")?,
            review_format: match values.text("REVIEW_FORMAT")?.as_str() {
                "json" => ReviewFormat::Json,
                "protobuf" => ReviewFormat::Protobuf,
                other => return Err(one_of("REVIEW_FORMAT", other, "json, protobuf")),
            },
            allowed_queues: AllowedQueues {
                own: [retry_queue.clone(), manual_review_queue.clone()],
                allowed: values.globs("ALLOWED_QUEUES")?,
            },
            retry_queue,
            manual_review_queue,
            default_max_retries: values.within("DEFAULT_MAX_RETRIES", 0..=1000)?,
            base_delay,
            max_delay,
            jitter: values.millis("JITTER_MS", 0)?,
            max_age: values.millis("MAX_AGE_MS", 1)?,
            retry_poll_interval: values.millis("RETRY_POLL_INTERVAL_MS", 1)?,
            database_url: values.database_url("DATABASE_URL")?,
            database_pool_size: values.within("DATABASE_POOL_SIZE", 2..=1000)?,
            database_timeout: values.millis("DATABASE_TIMEOUT_MS", 1)?,
            migrate_on_start: values.parsed("MIGRATE_ON_START")?,
            intake_prefetch,
            intake_batch: intake_batch.min(usize::from(intake_prefetch)),
            intake_linger: values.millis("INTAKE_LINGER_MS", 0)?,
            dispatch_workers: values.within("DISPATCH_WORKERS", 1..=32)?,
            dispatch_batch: values.within("DISPATCH_BATCH", 1..=10_000)?,
            dispatch_batch_bytes: values.within("DISPATCH_BATCH_BYTES", 1..=1 << 30)?,
            confirm_timeout: values.millis("CONFIRM_TIMEOUT_MS", 1)?,
            broker_timeout: values.millis("BROKER_TIMEOUT_MS", 1)?,
            broker_heartbeat_seconds: values.within("BROKER_HEARTBEAT_SECONDS", 1..=3600)?,
            max_payload_bytes: values.within("MAX_PAYLOAD_BYTES", 0..=512 << 20)?,
            metrics_max_queues: values.within("METRICS_MAX_QUEUES", 1..=10_000)?,
            shutdown_timeout: values.millis("SHUTDOWN_TIMEOUT_MS", 1)?,
            log_level: values.log_filter("LOG_LEVEL")?,
            log_format: match values.text("LOG_FORMAT")?.as_str() {
                "auto" => LogFormat::Auto,
                "json" => LogFormat::Json,
                "pretty" => LogFormat::Pretty,
                other => return Err(one_of("LOG_FORMAT", other, "auto, json, pretty")),
            },
            effective: values.effective(),
        })
    }

    /// The settings in force as `NAME=value` lines, passwords hidden.
    pub fn describe(&self) -> String {
        self.effective
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect()
    }
}

/// `config` gives the layers; this gives each value a name in its error.
struct Values(Config);

impl Values {
    fn parsed<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, ConfigError> {
        self.0.get(&key(name)).map_err(|e| {
            let shown = self.raw(name);
            let why = match e {
                config::ConfigError::Type { expected, .. } => format!("expected {expected}"),
                other => other.to_string(),
            };
            ConfigError::new(name, format!("{shown:?} is not usable: {why}"))
        })
    }

    fn raw(&self, name: &str) -> String {
        match self.0.get::<Value>(&key(name)).map(|v| v.kind) {
            Ok(ValueKind::Array(items)) => items
                .into_iter()
                .map(|v| v.into_string().unwrap_or_default())
                .collect::<Vec<_>>()
                .join(","),
            _ => self.0.get_string(&key(name)).unwrap_or_default(),
        }
    }

    fn text(&self, name: &'static str) -> Result<String, ConfigError> {
        let text: String = self.parsed(name)?;
        if text.is_empty() {
            return Err(ConfigError::new(name, "must not be empty"));
        }
        Ok(text)
    }

    fn queue(&self, name: &'static str) -> Result<String, ConfigError> {
        let queue = self.text(name)?;
        if queue.len() > 255 {
            return Err(ConfigError::new(name, "a queue name has at most 255 bytes"));
        }
        Ok(queue)
    }

    fn within<T>(
        &self,
        name: &'static str,
        range: std::ops::RangeInclusive<T>,
    ) -> Result<T, ConfigError>
    where
        T: DeserializeOwned + PartialOrd + fmt::Display,
    {
        let value: T = self.parsed(name)?;
        if !range.contains(&value) {
            let (low, high) = (range.start(), range.end());
            return Err(ConfigError::new(
                name,
                format!("{value} is not between {low} and {high}"),
            ));
        }
        Ok(value)
    }

    fn millis(&self, name: &'static str, least: u64) -> Result<Duration, ConfigError> {
        // A century: beyond any sense, and safely inside Postgres's timestamps.
        const MOST: u64 = 100 * 366 * 86_400_000;
        self.within(name, least..=MOST).map(Duration::from_millis)
    }

    fn globs(&self, name: &'static str) -> Result<Option<GlobSet>, ConfigError> {
        let raw = self.raw(name);
        let patterns: Vec<&str> = raw
            .split(',')
            .map(str::trim)
            .filter(|p| !p.is_empty())
            .collect();
        if patterns.is_empty() {
            return Ok(None);
        }
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            set.add(Glob::new(pattern).map_err(|e| ConfigError::new(name, e))?);
        }
        set.build().map(Some).map_err(|e| ConfigError::new(name, e))
    }

    fn amqp_url(&self, name: &'static str) -> Result<SecretString, ConfigError> {
        let url = self.text(name)?;
        url.parse::<AMQPUri>()
            .map_err(|e| ConfigError::new(name, format!("not an AMQP URL: {e}")))?;
        Ok(url.into())
    }

    fn database_url(&self, name: &'static str) -> Result<SecretString, ConfigError> {
        let url = self.text(name)?;
        let scheme = Url::parse(&url)
            .map_err(|e| ConfigError::new(name, format!("not a URL: {e}")))?
            .scheme()
            .to_owned();
        if !matches!(scheme.as_str(), "postgres" | "postgresql") {
            return Err(one_of(name, &scheme, "postgresql://, postgres://"));
        }
        url.parse::<sqlx::postgres::PgConnectOptions>()
            .map_err(|e| ConfigError::new(name, format!("not a Postgres URL: {e}")))?;
        Ok(url.into())
    }

    fn log_filter(&self, name: &'static str) -> Result<String, ConfigError> {
        let filter = self.text(name)?;
        tracing_subscriber::EnvFilter::try_new(&filter)
            .map_err(|e| ConfigError::new(name, format!("not a log filter: {e}")))?;
        Ok(filter)
    }

    fn effective(&self) -> Vec<(&'static str, String)> {
        SETTINGS
            .iter()
            .map(|s| (s.name, redact(&self.raw(s.name))))
            .collect()
    }
}

fn key(name: &str) -> String {
    name.to_ascii_lowercase()
}

fn one_of(name: &str, got: &str, choices: &str) -> ConfigError {
    ConfigError::new(name, format!("{got:?} is not one of {choices}"))
}

fn read_file(path: &Path) -> Result<File<config::FileSourceString, FileFormat>, ConfigError> {
    let shown = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|e| ConfigError::new(&shown, e))?;
    let source = File::from_str(&text, FileFormat::Toml);
    let keys = Config::builder()
        .add_source(source.clone())
        .build()
        .and_then(Config::try_deserialize::<serde_json::Map<String, serde_json::Value>>)
        .map_err(|e| ConfigError::new(&shown, e))?;
    for found in keys.keys() {
        if !SETTINGS.iter().any(|s| key(s.name) == *found) {
            return Err(ConfigError::new(shown, format!("unknown key {found:?}")));
        }
    }
    Ok(source)
}

/// Hides the passwords of a URL, also one given as a parameter; other values
/// pass as they are.
fn redact(value: &str) -> String {
    const HIDDEN: &str = "***";
    let is_secret = |name: &str| name.to_ascii_lowercase().contains("password");
    let Ok(mut url) = Url::parse(value) else {
        return value.to_owned();
    };
    let in_query = url.query_pairs().any(|(name, _)| is_secret(&name));
    if url.password().is_none() && !in_query {
        return value.to_owned();
    }
    if url.password().is_some() {
        // Cannot fail: a URL that has a password has a host.
        let _ = url.set_password(Some(HIDDEN));
    }
    if in_query {
        let pairs: Vec<(String, String)> = url.query_pairs().into_owned().collect();
        let mut query = url.query_pairs_mut();
        query.clear();
        for (name, value) in &pairs {
            let shown = if is_secret(name) { HIDDEN } else { value };
            query.append_pair(name, shown);
        }
    }
    url.to_string()
}

/// Shows a URL without its password, for logs and errors.
pub fn without_password(url: &SecretString) -> String {
    redact(url.expose_secret())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(pairs: &[(&str, &str)]) -> Result<Settings, ConfigError> {
        Settings::load(None, |name| {
            pairs
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn the_defaults_are_the_seeds_except_the_poll_interval() {
        let s = load(&[]).unwrap();
        assert_eq!(s.http_port, 8086);
        assert_eq!(s.retry_queue, "retry.scheduled");
        assert_eq!(s.manual_review_queue, "manual-review.pending");
        assert_eq!(s.default_max_retries, 3);
        assert_eq!(s.base_delay, Duration::from_secs(2));
        assert_eq!(s.max_delay, Duration::from_secs(60));
        assert_eq!(s.retry_poll_interval, Duration::from_secs(1));
    }

    #[test]
    fn each_bad_value_is_one_line_that_names_its_variable() {
        for (name, value) in [
            ("HTTP_PORT", "eighty"),
            ("HTTP_PORT", "70000"),
            ("HTTP_HOST", "nowhere"),
            ("RABBITMQ_URL", "localhost"),
            ("RABBITMQ_URL", "http://localhost"),
            ("DATABASE_URL", "mysql://localhost/x"),
            ("DATABASE_URL", "::"),
            ("DEFAULT_MAX_RETRIES", "-1"),
            ("BASE_DELAY_MS", "0"),
            ("BASE_DELAY_MS", "2s"),
            ("MAX_DELAY_MS", "1"),
            ("RETRY_QUEUE", ""),
            ("MANUAL_REVIEW_QUEUE", "retry.scheduled"),
            ("ALLOWED_QUEUES", "a[b"),
            ("REVIEW_FORMAT", "xml"),
            ("LOG_FORMAT", "loud"),
            ("LOG_LEVEL", "=="),
            ("MIGRATE_ON_START", "maybe"),
            ("DATABASE_POOL_SIZE", "1"),
        ] {
            let error = load(&[(name, value)]).expect_err(name).to_string();
            assert!(error.starts_with(&format!("{name}: ")), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn the_environment_wins_over_the_file_and_unknown_keys_are_refused() {
        let dir = std::env::temp_dir().join(format!("rs-config-{}", uuid::Uuid::now_v7()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("settings.toml");
        std::fs::write(
            &path,
            "http_port = 1000\nbase_delay_ms = 5\nallowed_queues = ['a', 'b.*']\n",
        )
        .unwrap();
        let env = |name: &str| (name == "HTTP_PORT").then(|| "2000".to_owned());
        let s = Settings::load(Some(&path), env).unwrap();
        assert_eq!(s.http_port, 2000);
        assert_eq!(s.base_delay, Duration::from_millis(5));
        assert!(s.allowed_queues.refusal("b.c").is_none());
        assert!(s.allowed_queues.refusal("c").is_some());

        std::fs::write(&path, "http_prot = 1000\n").unwrap();
        let error = Settings::load(Some(&path), |_| None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("unknown key \"http_prot\""), "{error}");

        let error = Settings::load(Some(&dir.join("absent.toml")), |_| None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("absent.toml"), "{error}");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn passwords_are_not_shown() {
        let s = load(&[
            ("DATABASE_URL", "postgresql://me:hunter2@db/x"),
            ("RABBITMQ_URL", "amqp://me:hunter3@mq/%2f"),
        ])
        .unwrap();
        let shown = format!("{}{s:?}", s.describe());
        assert!(!shown.contains("hunter"), "{shown}");
        assert!(shown.contains("DATABASE_URL=postgresql://me:***@db/x"));
    }

    #[test]
    fn strangers_cannot_name_our_own_queues() {
        let s = load(&[]).unwrap();
        for queue in [
            "retry.scheduled",
            "manual-review.pending",
            "amq.rabbitmq.reply-to",
        ] {
            assert!(s.allowed_queues.refusal(queue).is_some(), "{queue}");
        }
        assert!(s.allowed_queues.refusal("invoices").is_none());
    }
}
