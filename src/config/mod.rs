//! Settings: defaults, then an optional TOML file, then the environment.
//!
//! [`SETTINGS`] is the one list of what can be set; `.env.example` and the
//! README's table are tested against it.

mod list;
mod values;

use std::{
    fmt,
    net::IpAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use config::Config;
use secrecy::SecretString;
use url::Url;

pub use list::{SETTINGS, Setting};
use values::{Values, key, one_of, read_file};

use crate::{
    domain::{limits::MOST_RETRIES, queues::AllowedQueues},
    wire::ReviewFormat,
};

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Pretty on a terminal, JSON elsewhere.
    Auto,
    /// One JSON object a line, for programs.
    Json,
    /// Coloured text, for people.
    Pretty,
}

/// All settings, parsed and checked.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // each field is documented by its entry in SETTINGS
pub struct Settings {
    pub service_name: String,
    pub http_host: IpAddr,
    pub http_port: u16,
    pub rabbitmq_url: SecretString,
    pub rabbitmq_management_url: Option<Url>,
    pub retry_queue: String,
    pub manual_review_queue: String,
    pub dead_letter_queues: Vec<String>,
    pub review_format: ReviewFormat,
    pub allowed_queues: AllowedQueues,
    pub default_max_retries: i32,
    pub max_retries_limit: i32,
    pub policies_file: Option<PathBuf>,
    pub base_delay: Duration,
    pub max_delay: Duration,
    pub jitter: Duration,
    pub max_age: Duration,
    pub retry_poll_interval: Duration,
    pub database_url: SecretString,
    pub database_schema: Option<String>,
    pub database_pool_size: u32,
    pub database_timeout: Duration,
    pub migrate_on_start: bool,
    pub intake_prefetch: u16,
    pub intake_memory_bytes: usize,
    pub intake_batch: usize,
    pub intake_linger: Duration,
    pub dispatch_workers: usize,
    pub dispatch_batch: usize,
    pub dispatch_batch_bytes: usize,
    pub confirm_timeout: Duration,
    pub broker_timeout: Duration,
    pub broker_heartbeat_seconds: u16,
    pub max_payload_bytes: usize,
    pub idempotency_keys: Duration,
    pub retain_retried: Duration,
    pub retain_reviewed: Duration,
    pub retain_events: Duration,
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
        let dead_letter_queues = values.queues("DEAD_LETTER_QUEUE")?;
        let mut own = vec![retry_queue.clone(), manual_review_queue.clone()];
        for queue in &dead_letter_queues {
            if own.contains(queue) {
                return Err(ConfigError::new(
                    "DEAD_LETTER_QUEUE",
                    format!(
                        "{queue:?} must stand once, and differ from RETRY_QUEUE and \
                         MANUAL_REVIEW_QUEUE"
                    ),
                ));
            }
            own.push(queue.clone());
        }
        let base_delay = values.millis("BASE_DELAY_MS", 1)?;
        let max_delay = values.millis("MAX_DELAY_MS", 1)?;
        if max_delay < base_delay {
            return Err(ConfigError::new(
                "MAX_DELAY_MS",
                "must not be below BASE_DELAY_MS",
            ));
        }
        let database_pool_size: u32 = values.within("DATABASE_POOL_SIZE", 2..=1000)?;
        let dispatch_workers: u16 = values.within("DISPATCH_WORKERS", 1..=32)?;
        // Each worker and each intake loop holds one connection at a time; the janitor and
        // `/ready` share one more.
        let intakes = 1 + dead_letter_queues.len();
        let needed = usize::from(dispatch_workers) + intakes + 1;
        if usize::try_from(database_pool_size).is_ok_and(|size| size < needed) {
            return Err(ConfigError::new(
                "DATABASE_POOL_SIZE",
                format!(
                    "must be at least {needed} with {dispatch_workers} DISPATCH_WORKERS and \
                     {intakes} intake queue(s), or intake would wait for a connection"
                ),
            ));
        }
        let intake_prefetch = values.within("INTAKE_PREFETCH", 1..=u16::MAX)?;
        let intake_batch = values.within("INTAKE_BATCH", 1..=10_000)?;
        Ok(Self {
            service_name: values.text("SERVICE_NAME")?,
            http_host: values.parsed("HTTP_HOST")?,
            http_port: values.parsed("HTTP_PORT")?,
            rabbitmq_url: values.amqp_url("RABBITMQ_URL")?,
            rabbitmq_management_url: values.management_url("RABBITMQ_MANAGEMENT_URL")?,
            review_format: match values.text("REVIEW_FORMAT")?.as_str() {
                "json" => ReviewFormat::Json,
                "protobuf" => ReviewFormat::Protobuf,
                other => return Err(one_of("REVIEW_FORMAT", other, "json, protobuf")),
            },
            allowed_queues: AllowedQueues::new(own, values.globs("ALLOWED_QUEUES")?),
            retry_queue,
            manual_review_queue,
            dead_letter_queues,
            default_max_retries: values.within("DEFAULT_MAX_RETRIES", 0..=MOST_RETRIES)?,
            max_retries_limit: values.within("MAX_RETRIES_LIMIT", 0..=MOST_RETRIES)?,
            policies_file: values.optional("POLICIES_FILE").map(PathBuf::from),
            base_delay,
            max_delay,
            jitter: values.millis("JITTER_MS", 0)?,
            max_age: values.millis("MAX_AGE_MS", 1)?,
            retry_poll_interval: values.millis("RETRY_POLL_INTERVAL_MS", 1)?,
            database_url: values.database_url("DATABASE_URL")?,
            database_schema: values.schema("DATABASE_SCHEMA")?,
            database_pool_size,
            database_timeout: values.millis("DATABASE_TIMEOUT_MS", 1)?,
            migrate_on_start: values.parsed("MIGRATE_ON_START")?,
            intake_prefetch,
            intake_memory_bytes: values.within("INTAKE_MEMORY_BYTES", 65_536..=1 << 40)?,
            intake_batch: intake_batch.min(usize::from(intake_prefetch)),
            intake_linger: values.millis("INTAKE_LINGER_MS", 0)?,
            dispatch_workers: dispatch_workers.into(),
            dispatch_batch: values.within("DISPATCH_BATCH", 1..=10_000)?,
            dispatch_batch_bytes: values.within("DISPATCH_BATCH_BYTES", 1..=1 << 30)?,
            confirm_timeout: values.millis("CONFIRM_TIMEOUT_MS", 1)?,
            broker_timeout: values.millis("BROKER_TIMEOUT_MS", 1)?,
            broker_heartbeat_seconds: values.within("BROKER_HEARTBEAT_SECONDS", 1..=3600)?,
            max_payload_bytes: values.within("MAX_PAYLOAD_BYTES", 0..=512 << 20)?,
            idempotency_keys: values.hours("IDEMPOTENCY_KEY_HOURS")?,
            retain_retried: values.hours("RETAIN_RETRIED_HOURS")?,
            retain_reviewed: values.hours("RETAIN_REVIEWED_HOURS")?,
            retain_events: values.hours("RETAIN_EVENTS_HOURS")?,
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

    /// How many queues messages are taken from.
    pub fn intake_queues(&self) -> usize {
        1 + self.dead_letter_queues.len()
    }

    /// The settings in force as `NAME=value` lines, passwords hidden.
    pub fn describe(&self) -> String {
        self.effective
            .iter()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect()
    }
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
    fn the_defaults_are_those_that_the_readme_names() {
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
            ("RABBITMQ_MANAGEMENT_URL", "localhost:15672"),
            (
                "RABBITMQ_MANAGEMENT_URL",
                "http://me:secret@localhost:15672",
            ),
            ("DATABASE_URL", "mysql://localhost/x"),
            ("DATABASE_URL", "::"),
            (
                "DATABASE_URL",
                "postgresql://localhost/x?statement-cache-capacity=0",
            ),
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
            ("DATABASE_SCHEMA", "pg_ours"),
            ("DATABASE_SCHEMA", "a\"b"),
            ("DATABASE_SCHEMA", "a\nb"),
            (
                "DATABASE_SCHEMA",
                "a-name-that-is-longer-than-the-sixty-three-bytes-which-postgres-keeps",
            ),
            ("INTAKE_MEMORY_BYTES", "64"),
            ("DATABASE_POOL_SIZE", "1"),
            ("DATABASE_POOL_SIZE", "3"),
            ("DEAD_LETTER_QUEUE", "retry.scheduled"),
            ("DEAD_LETTER_QUEUE", "a.XQ,manual-review.pending"),
            ("DEAD_LETTER_QUEUE", "a.XQ, b.XQ, a.XQ"),
            ("DEAD_LETTER_QUEUE", "a.XQ,b\nc"),
            ("MAX_RETRIES_LIMIT", "-3"),
            ("RETAIN_EVENTS_HOURS", "0"),
            // Twenty years, twice as long as any policy may last.
            ("MAX_AGE_MS", "630720000000"),
            ("JITTER_MS", "630720000000"),
            ("DEFAULT_MAX_RETRIES", "1001"),
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
    fn dead_letter_queues_are_a_list_that_the_pool_must_serve() {
        assert!(load(&[]).unwrap().dead_letter_queues.is_empty());
        let five = "a.XQ, b.XQ,c.XQ,,d.XQ, e.XQ,";
        let s = load(&[("DEAD_LETTER_QUEUE", five)]).unwrap();
        let queues = ["a.XQ", "b.XQ", "c.XQ", "d.XQ", "e.XQ"];
        assert_eq!(s.dead_letter_queues, queues);
        for queue in queues {
            assert!(s.allowed_queues.refusal(queue).is_some(), "{queue}");
        }
        let least = [("DEAD_LETTER_QUEUE", five), ("DATABASE_POOL_SIZE", "9")];
        load(&least).unwrap();
        let few = [("DEAD_LETTER_QUEUE", five), ("DATABASE_POOL_SIZE", "8")];
        let error = load(&few).expect_err("too few").to_string();
        assert!(
            error.starts_with("DATABASE_POOL_SIZE: must be at least 9"),
            "{error}"
        );
    }

    #[test]
    fn a_retention_may_be_a_fraction_of_an_hour() {
        let s = load(&[("RETAIN_RETRIED_HOURS", "0.01")]).unwrap();
        assert_eq!(s.retain_retried, Duration::from_secs(36));
        assert_eq!(s.retain_events, Duration::from_secs(2160 * 3600));
        load(&[("RETAIN_EVENTS_HOURS", "NaN")]).expect_err("no number");
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
