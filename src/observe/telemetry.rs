//! Logs: JSON for machines, pretty for people; never payloads, never secrets.

use std::{borrow::Cow, error::Error, io::IsTerminal};

use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter,
    fmt::{
        self, FmtContext, FormatEvent, FormatFields,
        format::{Format, Json, Writer},
    },
    layer::SubscriberExt,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::config::{LogFormat, Settings};

/// The most bytes of a stranger's text in one log line; the rest is cut.
const MAX_LOGGED_BYTES: usize = 500;

/// Starts logging to standard error, so that command output stays clean.
pub fn start(settings: &Settings, instance: &str) -> anyhow::Result<()> {
    let filter = filter(&settings.log_level)?;
    let registry = tracing_subscriber::registry().with(filter);
    let pretty = match settings.log_format {
        LogFormat::Pretty => true,
        LogFormat::Json => false,
        LogFormat::Auto => std::io::stderr().is_terminal(),
    };
    let lines = fmt::layer().with_writer(std::io::stderr);
    if pretty {
        registry.with(lines.with_target(false)).try_init()?;
    } else {
        let signed = Signed::new(&settings.service_name, instance);
        registry
            .with(lines.json().event_format(signed))
            .try_init()?;
    }
    Ok(())
}

/// JSON lines that each say which service, instance and version wrote them.
struct Signed {
    json: Format<Json>,
    /// The fields that come first in every line, with the opening brace.
    head: String,
}

impl Signed {
    fn new(service: &str, instance: &str) -> Self {
        let head = serde_json::json!({
            "service": service,
            "instance": instance,
            "version": env!("CARGO_PKG_VERSION"),
        });
        let mut head = head.to_string();
        // The line's own fields follow where the object would have ended.
        head.pop();
        head.push(',');
        Self {
            json: Format::default().json().flatten_event(true),
            head,
        }
    }
}

impl<S, N> FormatEvent<S, N> for Signed
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let mut line = String::new();
        self.json
            .format_event(context, Writer::new(&mut line), event)?;
        writer.write_str(&self.head)?;
        writer.write_str(line.strip_prefix('{').unwrap_or(&line))
    }
}

/// An error and its causes in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let said = next.to_string();
        // Some errors repeat their cause in their own words.
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = next.source();
    }
    text.replace('\n', " ")
}

/// The AMQP client reports as errors what we handle and report ourselves, such as a
/// look for a queue that is absent, so its lines are shown only when asked for. It logs
/// returned messages whole, payload included; those lines are never shown.
fn filter(level: &str) -> anyhow::Result<EnvFilter> {
    let mut filter = EnvFilter::try_new(level)?;
    if !level.contains("lapin") {
        filter = filter.add_directive("lapin=off".parse()?);
    }
    Ok(filter.add_directive("lapin::returned_messages=off".parse()?))
}

/// A stranger's text made fit for a log line: control characters are escaped, and long
/// text is cut.
pub fn one_line(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_LOGGED_BYTES && !text.chars().any(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut line = String::new();
    for c in text.chars() {
        if line.len() >= MAX_LOGGED_BYTES {
            line.push('…');
            break;
        }
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    Cow::Owned(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clients_own_lines_are_shown_only_when_asked_for() {
        let shown = |level| filter(level).unwrap().to_string();
        assert!(shown("info").contains("lapin=off"));
        let asked = shown("info,lapin=debug");
        assert!(asked.contains("lapin=debug") && !asked.contains("lapin=off"));
        assert!(asked.contains("lapin::returned_messages=off"));
    }

    #[test]
    fn a_chain_names_every_cause_once_and_in_one_line() {
        let cause = sqlx::Error::Protocol("a\nb".into());
        let error = crate::store::StoreError::Unavailable(cause);
        assert_eq!(
            chain(&error),
            "Postgres is not available: encountered unexpected or invalid data: a b"
        );
    }

    #[test]
    fn a_strangers_text_cannot_break_out_of_its_line() {
        assert_eq!(one_line("a\nb\x1b[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(one_line("plain é"), "plain é");
        assert!(one_line(&"x".repeat(10_000)).len() < 600);
    }
}
