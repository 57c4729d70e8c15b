//! Shows the findings: as a table for people, as JSON for programs.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{
    field::Field,
    finding::{Finding, Reach, Spread},
};

/// All findings, and what describes the machine and the services they were measured on.
pub struct Report {
    pub form: &'static str,
    pub surroundings: Vec<String>,
    pub findings: Vec<Finding>,
}

impl Report {
    pub fn new(field: &Field, full: bool) -> Self {
        let mut surroundings = vec![
            machine(),
            field.rows.server.clone(),
            field.broker.clone(),
            format!("load before: {}", load_average()),
        ];
        let settings = &field.setup.settings;
        surroundings.extend(
            settings
                .iter()
                .map(|(name, value)| format!("{name}={value}")),
        );
        Self {
            form: if full { "full" } else { "quick" },
            surroundings,
            findings: Vec::new(),
        }
    }

    pub fn add(&mut self, findings: Vec<Finding>) {
        self.findings.extend(findings);
    }

    pub fn took(&mut self, time: Duration) {
        self.surroundings
            .push(format!("{} form, {} s", self.form, time.as_secs()));
    }

    /// The findings for a terminal, in aligned columns.
    pub fn table(&self) -> String {
        let mut lines = vec![HEAD.map(str::to_owned)];
        lines.extend(self.lines());
        let width = |column: usize| lines.iter().map(|l| l[column].chars().count()).max();
        let widths: Vec<usize> = (0..HEAD.len()).filter_map(width).collect();
        let mut text = format!("\n{}\n\n", self.surroundings.join(" · "));
        for line in lines {
            let cells = line.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, width)| format!("{cell:width$}"))
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    pub fn markdown(&self) -> String {
        let row = |cells: [String; HEAD.len()]| format!("| {} |\n", cells.join(" | "));
        let mut text = row(HEAD.map(str::to_owned));
        text.push_str(&row(HEAD.map(|_| "---".to_owned())));
        text.extend(self.lines().map(row));
        format!("{}\n\n{text}", self.surroundings.join(" · "))
    }

    fn lines(&self) -> impl Iterator<Item = [String; HEAD.len()]> {
        self.findings.iter().map(|f| {
            let against = f.against.as_ref();
            [
                f.scenario.to_owned(),
                f.what.clone(),
                format!("{} {}", spread(Spread::of(&f.samples)), f.unit),
                against.map_or(String::new(), |(floor, ratios)| {
                    format!("{} of {floor}", spread(Spread::of(ratios)))
                }),
                f.reach.map_or(String::new(), |reach| match reach {
                    Reach::AtLeast(least) => format!("≥ {}", short(least)),
                    Reach::AtMost(most) => format!("≤ {}", short(most)),
                }),
                verdict(f),
            ]
        })
    }

    pub fn json(&self) -> Value {
        let findings = self.findings.iter().map(|f| {
            let of = Spread::of(&f.samples);
            json!({
                "scenario": f.scenario,
                "what": f.what,
                "unit": f.unit,
                "samples": f.samples,
                "median": of.median,
                "min": of.least,
                "max": of.most,
                "against": f.against.as_ref().map(|(floor, ratios)| {
                    let of = Spread::of(ratios);
                    json!({
                        "floor": floor,
                        "ratios": ratios,
                        "median": of.median,
                        "min": of.least,
                        "max": of.most,
                    })
                }),
                "reach": f.reach.map(|reach| match reach {
                    Reach::AtLeast(least) => json!({ "at_least": least }),
                    Reach::AtMost(most) => json!({ "at_most": most }),
                }),
                "met": f.is_met(),
            })
        });
        json!({
            "form": self.form,
            "surroundings": self.surroundings,
            "findings": findings.collect::<Vec<_>>(),
        })
    }
}

const HEAD: [&str; 6] = [
    "scenario",
    "measured",
    "median (min–max)",
    "ratio",
    "reach",
    "",
];

fn verdict(finding: &Finding) -> String {
    match (finding.reach, finding.is_met()) {
        (_, Some(true)) => "reached".into(),
        (Some(Reach::AtLeast(aim) | Reach::AtMost(aim)), Some(false)) => {
            let off = (finding.judged().median / aim - 1.0) * 100.0;
            format!("missed by {:.0} %", off.abs())
        }
        _ => String::new(),
    }
}

/// The median, and in brackets the least and the most.
pub fn spread(of: Spread) -> String {
    if of.least == of.most {
        return short(of.median);
    }
    format!(
        "{} ({}–{})",
        short(of.median),
        short(of.least),
        short(of.most)
    )
}

/// A number with about three digits; from 100 on, without a fraction.
pub fn short(number: f64) -> String {
    match number.abs() {
        n if n >= 100.0 || n.fract() == 0.0 => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

fn machine() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "model name").then(|| value.trim().to_owned())
    });
    let memory = read("/proc/meminfo");
    let kilobytes: Option<f64> = memory
        .split_whitespace()
        .nth(1)
        .and_then(|number| number.parse().ok());
    format!(
        "{cpus} CPUs ({}), {:.0} GB",
        model.unwrap_or_else(|| std::env::consts::ARCH.into()),
        kilobytes.unwrap_or_default() / 1e6
    )
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace()
        .next()
        .unwrap_or("unknown")
        .to_owned()
}
