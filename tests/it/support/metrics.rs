//! Reads the text that Prometheus scrapes.

use std::collections::HashMap;

/// The samples of a scrape. A sample's name includes its labels, as in
/// `retries_scheduled_total{queue="a"}`.
#[derive(Debug)]
pub struct Scrape(HashMap<String, f64>);

impl Scrape {
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

    /// The value of one sample; 0 if it is not there.
    pub fn get(&self, sample: &str) -> f64 {
        self.0.get(sample).copied().unwrap_or(0.0)
    }

    /// The sum of a metric's samples over all labels.
    pub fn sum(&self, metric: &str) -> f64 {
        self.0
            .iter()
            .filter(|(name, _)| name.split('{').next() == Some(metric))
            .map(|(_, value)| value)
            .sum()
    }
}
