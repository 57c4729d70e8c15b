//! Logs: JSON for machines, pretty for people; never payloads, never secrets.

use std::{borrow::Cow, io::IsTerminal};

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::{LogFormat, Settings};

/// Error text is a stranger's: what is longer than this does not fit a log line.
const MAX_LOGGED_BYTES: usize = 500;

/// Starts logging to standard error, so that command output stays clean.
pub fn start(settings: &Settings) -> anyhow::Result<()> {
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
        registry.with(lines.json().flatten_event(true)).try_init()?;
    }
    Ok(())
}

/// lapin reports as errors what we handle and report ourselves, such as a look
/// for a queue that is absent: it speaks only when asked to. Returned messages
/// it logs whole, payload included: never.
fn filter(level: &str) -> anyhow::Result<EnvFilter> {
    let mut filter = EnvFilter::try_new(level)?;
    if !level.contains("lapin") {
        filter = filter.add_directive("lapin=off".parse()?);
    }
    Ok(filter.add_directive("lapin::returned_messages=off".parse()?))
}

/// A stranger's text made fit for a log line: control characters escaped, cut.
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
    fn a_strangers_text_cannot_break_out_of_its_line() {
        assert_eq!(one_line("a\nb\x1b[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(one_line("plain é"), "plain é");
        assert!(one_line(&"x".repeat(10_000)).len() < 600);
    }
}
