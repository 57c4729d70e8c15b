//! Reads and checks single settings; every error names its setting.

use std::{borrow::Cow, fmt, path::Path, time::Duration};

use config::{Config, File, FileFormat, Value, ValueKind};
use globset::{Glob, GlobSet, GlobSetBuilder};
use secrecy::{ExposeSecret, SecretString};
use serde::de::DeserializeOwned;
use url::Url;

use super::{ConfigError, SETTINGS};
use crate::domain::{limits::LONGEST_DURATION, queues::name_problem};

/// Postgres cuts off the rest of a longer name.
const LONGEST_IDENTIFIER: usize = 63;

/// The entries of a list that is separated by commas.
fn list(raw: &str) -> impl Iterator<Item = &str> {
    let entries = raw.split(',').map(str::trim);
    entries.filter(|entry| !entry.is_empty())
}

/// The layers of settings, with errors that name the setting.
pub(super) struct Values(pub(super) Config);

impl Values {
    pub(super) fn parsed<T: DeserializeOwned>(&self, name: &'static str) -> Result<T, ConfigError> {
        self.0.get(&key(name)).map_err(|e| {
            let shown = self.raw(name);
            let why = match e {
                config::ConfigError::Type { expected, .. } => format!("expected {expected}"),
                other => other.to_string(),
            };
            ConfigError::new(name, format!("{shown:?} is not usable: {why}"))
        })
    }

    pub(super) fn raw(&self, name: &str) -> String {
        match self.0.get::<Value>(&key(name)).map(|v| v.kind) {
            Ok(ValueKind::Array(items)) => items
                .into_iter()
                .map(|v| v.into_string().unwrap_or_default())
                .collect::<Vec<_>>()
                .join(","),
            _ => self.0.get_string(&key(name)).unwrap_or_default(),
        }
    }

    pub(super) fn text(&self, name: &'static str) -> Result<String, ConfigError> {
        let text: String = self.parsed(name)?;
        if text.is_empty() {
            return Err(ConfigError::new(name, "must not be empty"));
        }
        Ok(text)
    }

    pub(super) fn optional(&self, name: &'static str) -> Option<String> {
        Some(self.raw(name)).filter(|text| !text.is_empty())
    }

    pub(super) fn queue(&self, name: &'static str) -> Result<String, ConfigError> {
        let queue: String = self.parsed(name)?;
        match name_problem(&queue) {
            Some(problem) => Err(ConfigError::new(name, format!("the queue name {problem}"))),
            None => Ok(queue),
        }
    }

    /// A list of queues, separated by commas; empty when nothing is set.
    pub(super) fn queues(&self, name: &'static str) -> Result<Vec<String>, ConfigError> {
        let mut queues = Vec::new();
        for queue in list(&self.raw(name)) {
            if let Some(problem) = name_problem(queue) {
                let problem = format!("the queue name {queue:?} {problem}");
                return Err(ConfigError::new(name, problem));
            }
            queues.push(queue.to_owned());
        }
        Ok(queues)
    }

    pub(super) fn within<T>(
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

    pub(super) fn millis(&self, name: &'static str, least: u64) -> Result<Duration, ConfigError> {
        let most = u64::try_from(LONGEST_DURATION.as_millis()).unwrap_or(u64::MAX);
        self.within(name, least..=most).map(Duration::from_millis)
    }

    pub(super) fn hours(&self, name: &'static str) -> Result<Duration, ConfigError> {
        // A fraction of an hour serves those who want to keep next to nothing.
        self.within(name, 0.001..=LONGEST_DURATION.as_secs_f64() / 3600.0)
            .map(|hours| Duration::from_secs_f64(hours * 3600.0))
    }

    pub(super) fn globs(&self, name: &'static str) -> Result<Option<GlobSet>, ConfigError> {
        let raw = self.raw(name);
        let patterns: Vec<&str> = list(&raw).collect();
        if patterns.is_empty() {
            return Ok(None);
        }
        let mut set = GlobSetBuilder::new();
        for pattern in patterns {
            set.add(Glob::new(pattern).map_err(|e| ConfigError::new(name, e))?);
        }
        set.build().map(Some).map_err(|e| ConfigError::new(name, e))
    }

    pub(super) fn amqp_url(&self, name: &'static str) -> Result<SecretString, ConfigError> {
        self.url(name, &["amqp", "amqps"])
    }

    pub(super) fn database_url(&self, name: &'static str) -> Result<SecretString, ConfigError> {
        let url = self.url(name, &["postgresql", "postgres"])?;
        // sqlx then prepares each statement each time it runs, under a new name, and never
        // closes one: the memory of the backends would grow without end.
        let uncached = |(key, value): (Cow<'_, str>, Cow<'_, str>)| {
            key == "statement-cache-capacity" && value.parse() == Ok(0)
        };
        let parsed = Url::parse(url.expose_secret());
        if parsed.is_ok_and(|url| url.query_pairs().any(uncached)) {
            let why = "statement-cache-capacity=0 makes Postgres's memory grow and helps behind no \
                       pooler: leave it out";
            return Err(ConfigError::new(name, why));
        }
        Ok(url)
    }

    /// An address without a user: the API is asked with the user of RABBITMQ_URL.
    pub(super) fn management_url(&self, name: &'static str) -> Result<Option<Url>, ConfigError> {
        if self.optional(name).is_none() {
            return Ok(None);
        }
        let text = self.url(name, &["http", "https"])?;
        let url = Url::parse(text.expose_secret()).map_err(|e| ConfigError::new(name, e))?;
        if !url.username().is_empty() || url.password().is_some() {
            let problem = "must not name a user: the one of RABBITMQ_URL is used";
            return Err(ConfigError::new(name, problem));
        }
        Ok(Some(url))
    }

    /// A URL with one of these schemes. `Broker::new` and `Store::open` check the rest,
    /// before anything is started.
    fn url(&self, name: &'static str, schemes: &[&str]) -> Result<SecretString, ConfigError> {
        let text = self.text(name)?;
        let url =
            Url::parse(&text).map_err(|e| ConfigError::new(name, format!("not a URL: {e}")))?;
        if !schemes.contains(&url.scheme()) {
            let choices: Vec<String> = schemes.iter().map(|s| format!("{s}://")).collect();
            return Err(one_of(name, url.scheme(), &choices.join(", ")));
        }
        Ok(text.into())
    }

    /// The name of a schema, if one is set.
    pub(super) fn schema(&self, name: &'static str) -> Result<Option<String>, ConfigError> {
        let Some(schema) = self.optional(name) else {
            return Ok(None);
        };
        let problem = if schema.len() > LONGEST_IDENTIFIER {
            "has more bytes than the 63 that Postgres keeps of a name"
        } else if schema.chars().any(|c| c.is_control() || c == '"') {
            "has a quote or a control character"
        } else if schema.starts_with("pg_") {
            "begins with pg_, and such names belong to Postgres"
        } else {
            return Ok(Some(schema));
        };
        Err(ConfigError::new(name, format!("{schema:?} {problem}")))
    }

    pub(super) fn log_filter(&self, name: &'static str) -> Result<String, ConfigError> {
        let filter = self.text(name)?;
        tracing_subscriber::EnvFilter::try_new(&filter)
            .map_err(|e| ConfigError::new(name, format!("not a log filter: {e}")))?;
        Ok(filter)
    }

    pub(super) fn effective(&self) -> Vec<(&'static str, String)> {
        SETTINGS
            .iter()
            .map(|s| (s.name, redact(&self.raw(s.name))))
            .collect()
    }
}

pub(super) fn key(name: &str) -> String {
    name.to_ascii_lowercase()
}

pub(super) fn one_of(name: &str, got: &str, choices: &str) -> ConfigError {
    ConfigError::new(name, format!("{got:?} is not one of {choices}"))
}

pub(super) fn read_file(
    path: &Path,
) -> Result<File<config::FileSourceString, FileFormat>, ConfigError> {
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

/// Hides the passwords of a URL, also those given as parameters. Other values pass as
/// they are.
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
        // This cannot fail, since a URL that has a password has a host.
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
