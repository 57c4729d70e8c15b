//! What was found, and how it is told.

use std::fmt;

use serde::Serialize;

/// How bad a finding is. The order is that of the report's last line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// Messages can be lost or doubled, or nothing works.
    Problem,
    /// Nothing is lost by this alone, but it deserves a look.
    Warning,
    /// It could not be asked.
    Unknown,
    /// As it should be.
    Ok,
}

impl Grade {
    fn as_str(self) -> &'static str {
        match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
            Self::Unknown => "unknown",
            Self::Ok => "ok",
        }
    }
}

/// One fact of a set-up, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub grade: Grade,
    /// What it is about, such as `intake queue "retry.scheduled"`.
    pub subject: String,
    /// What was found.
    pub fact: String,
    /// What to do; nothing if all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cure: Option<String>,
}

impl Finding {
    pub(super) fn ok(subject: impl Into<String>, fact: impl Into<String>) -> Self {
        Self {
            grade: Grade::Ok,
            subject: subject.into(),
            fact: fact.into(),
            cure: None,
        }
    }

    pub(super) fn new(
        grade: Grade,
        subject: impl Into<String>,
        fact: impl Into<String>,
        cure: impl Into<String>,
    ) -> Self {
        Self {
            grade,
            subject: subject.into(),
            fact: fact.into(),
            cure: Some(cure.into()),
        }
    }
}

/// One line. Names and errors are strangers' words, so what would break the line is escaped.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = format!("{}: {}", self.subject, self.fact);
        if let Some(cure) = &self.cure {
            line.push_str(". Cure: ");
            line.push_str(cure);
        }
        let line: String = line
            .chars()
            .flat_map(|c| {
                let (escaped, plain) = if c.is_control() {
                    (Some(c.escape_default()), None)
                } else {
                    (None, Some(c))
                };
                escaped.into_iter().flatten().chain(plain)
            })
            .collect();
        write!(f, "{:<8} {line}", self.grade.as_str())
    }
}

/// All findings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order in which they were found.
    pub findings: Vec<Finding>,
}

impl Report {
    /// How many findings have this grade.
    pub fn count(&self, grade: Grade) -> usize {
        self.of(grade).count()
    }

    /// The findings of one grade.
    pub fn of(&self, grade: Grade) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |f| f.grade == grade)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        let plural = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
        writeln!(
            f,
            "{}, {}, {} unknown",
            plural(self.count(Grade::Problem), "problem"),
            plural(self.count(Grade::Warning), "warning"),
            self.count(Grade::Unknown)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line_whatever_it_names() {
        let finding = Finding::new(Grade::Problem, "queue \"a\nb\"", "is\tgone", "make it");
        let line = finding.to_string();
        assert_eq!(line, "problem  queue \"a\\nb\": is\\tgone. Cure: make it");
    }

    #[test]
    fn a_report_ends_with_its_counts() {
        let report = Report {
            findings: vec![
                Finding::ok("a", "fine"),
                Finding::new(Grade::Problem, "b", "bad", "mend it"),
            ],
        };
        let text = report.to_string();
        assert!(
            text.ends_with("\n1 problem, 0 warnings, 0 unknown\n"),
            "{text}"
        );
    }
}
