//! Logs: JSON for machines, pretty for people; never payloads, never secrets.

use std::{borrow::Cow, io::IsTerminal};

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::{LogFormat, Settings};

/// Error text is a stranger's: what is longer than this does not fit a log line.
const MAX_LOGGED_BYTES: usize = 500;

/// Starts logging to standard error, so that command output stays clean.
pub fn start(settings: &Settings) -> anyhow::Result<()> {
    // lapin logs returned messages whole, payload included.
    let filter = EnvFilter::try_new(&settings.log_level)?
        .add_directive("lapin::returned_messages=off".parse()?);
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
    fn a_strangers_text_cannot_break_out_of_its_line() {
        assert_eq!(one_line("a\nb\x1b[31m"), "a\\nb\\u{1b}[31m");
        assert_eq!(one_line("plain é"), "plain é");
        assert!(one_line(&"x".repeat(10_000)).len() < 600);
    }
}
