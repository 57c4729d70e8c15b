//! The table: a row for each contender. And the findings, for the aims and for JSON.

use bench::{
    finding::{Finding, Reach, Spread, quantile},
    report::{short, spread},
};

use crate::{
    contender::{Contender, OURS},
    process::Kind,
    race::Measured,
};

const NAME: &str = "peers";

const HEAD: [&str; 9] = [
    "contender",
    "messages/s",
    "ratio to ours",
    "all CPU µs",
    "Postgres µs",
    "own CPU µs",
    "WAL bytes",
    "MB idle / peak",
    "drift p50 / p99 ms",
];

type Line = [String; HEAD.len()];

fn lines(all: &[Measured]) -> Vec<Line> {
    let ours = all.iter().find(|one| one.contender == OURS);
    let median = |samples: &[f64]| short(quantile(samples, 0.5));
    let pair = |first: &[f64], second: &[f64]| match first.is_empty() {
        true => "–".to_owned(),
        false => format!("{} / {}", median(first), median(second)),
    };
    let line = |one: &Measured| {
        // Without processes and without a database of its own, there is nothing to tell of them.
        let in_broker = one.contender == Contender::DelayQueue;
        let unless = |not: bool, text: String| if not { "–".to_owned() } else { text };
        let no_database = in_broker || one.contender == Contender::Relay;
        let ratios = ours.map_or(Vec::new(), |ours| ratios(&one.rate, &ours.rate));
        [
            one.contender.title(),
            spread(Spread::of(&one.rate)),
            format!("{:.2}", quantile(&ratios, 0.5)),
            median(&one.machine_cpu),
            unless(no_database, median(&one.postgres_cpu)),
            unless(in_broker, median(&one.own_cpu)),
            unless(no_database, median(&one.wal)),
            unless(in_broker, pair(&one.idle, &one.peak)),
            pair(&one.late_p50, &one.late_p99),
        ]
    };
    all.iter().map(line).collect()
}

/// The ratio of each round.
fn ratios(samples: &[f64], to: &[f64]) -> Vec<f64> {
    samples.iter().zip(to).map(|(a, b)| a / b).collect()
}

/// The table for a terminal, in aligned columns.
pub fn text(all: &[Measured]) -> String {
    let mut lines = lines(all);
    lines.insert(0, HEAD.map(str::to_owned));
    let width = |column: usize| lines.iter().map(|l| l[column].chars().count()).max();
    let widths: Vec<usize> = (0..HEAD.len()).filter_map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths);
        let cells: Vec<String> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

pub fn markdown(all: &[Measured]) -> String {
    let row = |cells: Line| format!("| {} |\n", cells.join(" | "));
    let mut text = row(HEAD.map(str::to_owned));
    text.push_str(&row(HEAD.map(|_| "---".to_owned())));
    text.extend(lines(all).into_iter().map(row));
    text
}

/// What is aimed at. An aim whose contender was not measured is left out.
pub fn aims(all: &[Measured]) -> Vec<Finding> {
    let Some(ours) = all.iter().find(|one| one.contender == OURS) else {
        return Vec::new();
    };
    let mut aims = Vec::new();
    for one in all {
        let title = one.contender.title();
        let of_ours = |least| {
            finding("retry-scheduler", "messages/s", &ours.rate)
                .against(title.clone(), &one.rate)
                .reach(Reach::AtLeast(least))
        };
        match one.contender {
            Contender::DelayQueue | Contender::Relay | Contender::Ours(1) => {}
            // pgmq forgets a message; the others keep what became of it, as we do.
            Contender::Peer(Kind::Pgmq) => aims.push(of_ours(1.0)),
            Contender::Peer(_) => aims.push(of_ours(1.2)),
            Contender::Ours(_) => aims.push(
                finding(&title, "messages/s", &one.rate)
                    .against("one", &ours.rate)
                    .reach(Reach::AtLeast(0.95)),
            ),
        }
    }
    let at_most = |what: &str, unit, samples, most| {
        finding(&format!("ours, {what}"), unit, samples).reach(Reach::AtMost(most))
    };
    aims.extend([
        at_most("Postgres", "µs/message", &ours.postgres_cpu, 48.0),
        at_most("own CPU", "µs/message", &ours.own_cpu, 26.0),
        at_most("WAL", "bytes/message", &ours.wal, 2300.0),
    ]);
    aims
}

/// All that was measured, each round of it.
pub fn everything(all: &[Measured]) -> Vec<Finding> {
    let of_one = |one: &Measured| {
        let title = one.contender.title();
        let parts: [(&str, &'static str, &[f64]); 9] = [
            ("rate", "messages/s", &one.rate),
            ("all CPU", "µs/message", &one.machine_cpu),
            ("Postgres", "µs/message", &one.postgres_cpu),
            ("own CPU", "µs/message", &one.own_cpu),
            ("WAL", "bytes/message", &one.wal),
            ("idle", "MB", &one.idle),
            ("peak", "MB", &one.peak),
            ("drift p50", "ms", &one.late_p50),
            ("drift p99", "ms", &one.late_p99),
        ];
        parts.map(|(what, unit, samples)| finding(&format!("{title}: {what}"), unit, samples))
    };
    all.iter().flat_map(of_one).collect()
}

fn finding(what: &str, unit: &'static str, samples: &[f64]) -> Finding {
    Finding::new(NAME, what, unit, samples.to_vec())
}
