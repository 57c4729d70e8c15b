//! Draws the findings as bars in an SVG: a panel for each unit, a bar for each finding.

use std::fmt::Write;

use crate::{
    finding::{Finding, Spread},
    report::{Report, short},
};

const WIDTH: f64 = 960.0;
const BARS_FROM: f64 = 400.0;
const BARS_TO: f64 = 860.0;
const LINE: f64 = 22.0;

pub fn svg(report: &Report) -> String {
    let mut body = String::new();
    let mut y = 30.0;
    text(&mut body, 20.0, y, "title", "retry-scheduler, measured");
    y += LINE;
    text(
        &mut body,
        20.0,
        y,
        "small",
        &report.surroundings.join(" · "),
    );
    for unit in units(report) {
        y += 1.6 * LINE;
        text(&mut body, 20.0, y, "head", unit);
        let panel: Vec<&Finding> = report.findings.iter().filter(|f| f.unit == unit).collect();
        let most = panel
            .iter()
            .map(|f| Spread::of(&f.samples).most)
            .fold(f64::MIN_POSITIVE, f64::max);
        for finding in panel {
            y += LINE;
            bar(&mut body, y, finding, most);
        }
    }
    let height = y + 2.0 * LINE;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\">\n<style>\
         text{{font:12px sans-serif;fill:#222}}.title{{font-size:18px;font-weight:bold}}\
         .head{{font-weight:bold}}.small{{font-size:11px;fill:#666}}\
         .ours{{fill:#3b7dd8}}.floor{{fill:#b8bfc8}}.spread{{stroke:#222;stroke-width:1.5}}\
         </style>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

/// The units of the findings, in order of appearance.
fn units(report: &Report) -> Vec<&'static str> {
    let mut units = Vec::new();
    for finding in &report.findings {
        if !units.contains(&finding.unit) {
            units.push(finding.unit);
        }
    }
    units
}

fn bar(body: &mut String, y: f64, finding: &Finding, most: f64) {
    let of = Spread::of(&finding.samples);
    let x = |value: f64| BARS_FROM + (BARS_TO - BARS_FROM) * (value / most).clamp(0.0, 1.0);
    let label = format!("{}: {}", finding.scenario, finding.what);
    text(body, 20.0, y, "label", &label);
    // A finding that has an aim or is compared with something shows the service; any other is what
    // the service is compared with.
    let ours = finding.against.is_some() || finding.reach.is_some();
    let class = if ours { "ours" } else { "floor" };
    let (top, end) = (y - 12.0, x(of.median));
    let _ = writeln!(
        body,
        "<rect class=\"{class}\" x=\"{BARS_FROM}\" y=\"{top}\" width=\"{:.1}\" height=\"15\"/>",
        (end - BARS_FROM).max(1.0)
    );
    let middle = y - 4.5;
    let _ = writeln!(
        body,
        "<line class=\"spread\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle}\" y2=\"{middle}\"/>",
        x(of.least),
        x(of.most)
    );
    let mut value = short(of.median);
    if let Some((_, ratios)) = &finding.against {
        let _ = write!(value, " ({:.2}×)", Spread::of(ratios).median);
    }
    text(body, x(of.most) + 6.0, y, "small", &value);
}

fn text(body: &mut String, x: f64, y: f64, class: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        body,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>"
    );
}
