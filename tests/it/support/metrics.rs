//! Prometheus text, read back.

use std::collections::HashMap;

/// Samples by name with labels, as in `retries_scheduled_total{queue="a"}`.
#[derive(Debug)]
pub struct Scrape(HashMap<String, f64>);

impl Scrape {
    /// Reads the text format.
    pub fn parse(text: &str) -> Self {
        let samples = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty())
            .map(|line| {
                let (name, value) = line.rsplit_once(' ').expect("name and value");
                (name.to_owned(), value.parse().expect("a number"))
            });
        Self(samples.collect())
    }

    /// One sample; 0 when it is not there.
    pub fn get(&self, sample: &str) -> f64 {
        self.0.get(sample).copied().unwrap_or(0.0)
    }

    /// The sum over all labels of a metric.
    pub fn sum(&self, metric: &str) -> f64 {
        self.0
            .iter()
            .filter(|(name, _)| name.split('{').next() == Some(metric))
            .map(|(_, value)| value)
            .sum()
    }
}
