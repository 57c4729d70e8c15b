//! A finding: what was measured, what it is compared with, and the number it should reach.

/// The aim of a finding.
#[derive(Clone, Copy, Debug)]
pub enum Reach {
    AtLeast(f64),
    AtMost(f64),
}

impl Reach {
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

/// One quantity, measured once a round.
#[derive(Clone, Debug)]
pub struct Finding {
    pub scenario: &'static str,
    pub what: String,
    pub unit: &'static str,
    pub samples: Vec<f64>,
    /// The name of what it is compared with, and the ratio to that in each round.
    pub against: Option<(String, Vec<f64>)>,
    /// The aim: for the ratios if there are any, else for the samples.
    pub reach: Option<Reach>,
}

impl Finding {
    pub fn new(
        scenario: &'static str,
        what: impl Into<String>,
        unit: &'static str,
        samples: Vec<f64>,
    ) -> Self {
        Self {
            scenario,
            what: what.into(),
            unit,
            samples,
            against: None,
            reach: None,
        }
    }

    /// Compares each sample with the floor's sample of the same round.
    pub fn against(mut self, floor: impl Into<String>, samples: &[f64]) -> Self {
        let ratios = self.samples.iter().zip(samples).map(|(a, b)| a / b);
        self.against = Some((floor.into(), ratios.collect()));
        self
    }

    pub fn reach(mut self, reach: Reach) -> Self {
        self.reach = Some(reach);
        self
    }

    /// What the aim is for: the ratios if there are any, else the samples.
    pub fn judged(&self) -> Spread {
        match &self.against {
            Some((_, ratios)) => Spread::of(ratios),
            None => Spread::of(&self.samples),
        }
    }

    /// Whether the median reaches the aim; `None` if there is no aim.
    pub fn is_met(&self) -> Option<bool> {
        Some(self.reach?.is_met_by(self.judged().median))
    }
}

/// The median of some samples, and how far they lie apart.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Spread {
    pub fn of(samples: &[f64]) -> Self {
        Self {
            median: quantile(samples, 0.5),
            least: quantile(samples, 0.0),
            most: quantile(samples, 1.0),
        }
    }
}

/// The value that the share `q` of the samples lies below, interpolated between the two samples
/// nearest to it; 0 if there are no samples.
pub fn quantile(samples: &[f64], q: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return 0.0;
    };
    let at = q * last as f64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "q is between 0 and 1, so these are indices of the list"
    )]
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(quantile(&[4.0, 1.0, 3.0, 2.0], 0.5), 2.5);
        assert_eq!(quantile(&[5.0, 1.0, 3.0], 0.5), 3.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn a_ratio_is_judged_round_by_round() {
        let finding = Finding::new("s", "w", "1/s", vec![90.0, 50.0, 96.0])
            .against("floor", &[100.0, 50.0, 100.0])
            .reach(Reach::AtLeast(0.95));
        assert_eq!(finding.judged().median, 0.96);
        assert_eq!(finding.is_met(), Some(true));
    }
}
