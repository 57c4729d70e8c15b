//! Shows the summary: redrawn in place on a terminal, line by line elsewhere.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use crate::{
    ledger::{Counts, Mark, Told},
    rows::Row,
    services::SERVICES,
};

/// How many of the last events a terminal shows.
const EVENTS: usize = 8;

/// An event's text is cut to this many characters on a terminal.
const WIDTH: usize = 74;

/// How often the summary is printed where it cannot be redrawn.
const SUMMARY: Duration = Duration::from_secs(5);

/// Switches to the terminal's alternate screen, without a cursor and without wrapping of
/// lines; `LEAVE` undoes it. A narrow terminal then cuts long lines, while wrapped ones
/// would push the table off the screen.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

const LEGEND: [&str; 3] = [
    "A service that fails a message reports it. retry-scheduler keeps it in Postgres",
    "and sends it back after a growing wait, up to 3 times; then it goes to review,",
    "that is, to people. What no retry can help goes there at once.",
];

/// All numbers at one moment.
pub struct View {
    pub title: String,
    pub counts: [Counts; SERVICES.len()],
    pub rows: [Row; SERVICES.len()],
}

/// Where the summary goes.
pub enum Screen {
    Terminal {
        /// Whether the alternate screen is shown.
        entered: bool,
        colour: bool,
        events: VecDeque<String>,
    },
    Lines {
        start: Instant,
        summary: Instant,
    },
}

impl Screen {
    pub fn new() -> Self {
        let now = Instant::now();
        if io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb") {
            Self::Terminal {
                entered: false,
                colour: std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
                events: VecDeque::new(),
            }
        } else {
            Self::Lines {
                start: now,
                summary: now,
            }
        }
    }

    /// Shows the numbers, and the events that were told since the last call.
    pub fn draw(&mut self, view: &View, told: Vec<Told>) -> io::Result<()> {
        match self {
            Self::Terminal {
                entered,
                colour,
                events,
            } => {
                for event in told {
                    if events.len() == EVENTS {
                        events.pop_front();
                    }
                    events.push_back(event.line(*colour, WIDTH));
                }
                let mut lines = vec![view.title.clone(), String::new()];
                lines.extend(LEGEND.map(str::to_owned));
                lines.push(String::new());
                lines.extend(view.table());
                lines.push(String::new());
                lines.extend(events.iter().cloned());
                let mut frame = String::new();
                if !std::mem::replace(entered, true) {
                    frame += ENTER;
                }
                frame += "\x1b[H\x1b[2K";
                frame += &lines.join("\r\n\x1b[2K");
                put(&(frame + "\x1b[J"))
            }
            Self::Lines { start, summary } => {
                let at = start.elapsed().as_secs_f64();
                let mut out: String = told
                    .iter()
                    .map(|event| format!("{at:5.1} s  {}\n", event.line(false, usize::MAX)))
                    .collect();
                if summary.elapsed() >= SUMMARY {
                    *summary = Instant::now();
                    out += &format!("{at:5.1} s  = {}\n", view.summary());
                }
                put(&out)
            }
        }
    }

    /// Leaves the alternate screen, so that the terminal is as it was before.
    pub fn clear(&mut self) -> io::Result<()> {
        if let Self::Terminal { entered, .. } = self
            && std::mem::take(entered)
        {
            put(LEAVE)?;
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.clear();
    }
}

impl Told {
    fn line(&self, colour: bool, width: usize) -> String {
        let (sign, code) = match self.mark {
            Mark::Failed => ('✗', 31),
            Mark::Back => ('↻', 33),
            Mark::Done => ('✓', 32),
            Mark::Review => ('⚑', 35),
        };
        let mut text = self.text.clone();
        if let Some((cut, _)) = text.char_indices().nth(width) {
            text.truncate(cut);
            text.push('…');
        }
        if colour {
            format!("  \x1b[{code}m{sign}\x1b[0m {text}")
        } else {
            format!("  {sign} {text}")
        }
    }
}

impl View {
    /// The table, line by line. The last line has the sums.
    pub fn table(&self) -> Vec<String> {
        let mut lines = vec![line(
            ["", ""],
            [
                "sent", "done", "failed", "waiting", "next in", "back", "review",
            ],
        )];
        for ((service, c), row) in SERVICES.iter().zip(&self.counts).zip(&self.rows) {
            lines.push(numbers([service.name, service.habit], c, row));
        }
        let (counts, row) = self.sums();
        lines.push(numbers(["all", ""], &counts, &row));
        lines
    }

    fn summary(&self) -> String {
        let (c, row) = self.sums();
        format!(
            "{}: {} sent, {} done, {} failures, {} waiting, {} came back, {} in review",
            self.title, c.sent, c.succeeded, c.failed, row.waiting, c.back, c.reviewed
        )
    }

    fn sums(&self) -> (Counts, Row) {
        let mut all = (Counts::default(), Row::default());
        for (c, row) in self.counts.iter().zip(&self.rows) {
            all.0.sent += c.sent;
            all.0.succeeded += c.succeeded;
            all.0.failed += c.failed;
            all.0.back += c.back;
            all.0.reviewed += c.reviewed;
            all.1.waiting += row.waiting;
        }
        all
    }
}

fn numbers(names: [&str; 2], c: &Counts, row: &Row) -> String {
    let next = row.next.map(|s| format!("{s:.1} s")).unwrap_or_default();
    let [sent, done, failed, waiting, back, review] = [
        c.sent,
        c.succeeded,
        c.failed,
        row.waiting,
        c.back,
        c.reviewed,
    ]
    .map(|n| n.to_string());
    line(
        names,
        [&sent, &done, &failed, &waiting, &next, &back, &review],
    )
}

/// One line of the table, 79 columns wide.
fn line([name, habit]: [&str; 2], cells: [&str; 7]) -> String {
    let [sent, done, failed, waiting, next, back, review] = cells;
    format!(
        "{name:<9}{habit:<19}{sent:>5}{done:>6}{failed:>8}{waiting:>9}{next:>9}{back:>6}{review:>8}"
    )
}

/// Prints `text`. When the reader of a pipe has gone away that is an error, where
/// `print!` would panic.
pub fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
