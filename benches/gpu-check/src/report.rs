//! What parts report: numbers with their units, verdicts with their formulas, what was chosen, notes.

use std::fmt;

use serde::Serialize;

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum Unit {
    /// 10^9 bytes a second.
    #[serde(rename = "GB/s")]
    GigabytesPerSecond,
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Thousandths of a second.
    #[serde(rename = "ms")]
    Milliseconds,
    /// Millionths of a second.
    #[serde(rename = "us")]
    Microseconds,
    /// Bytes.
    #[serde(rename = "bytes")]
    Bytes,
    /// A part of a whole, or a ratio of two numbers of one unit.
    #[serde(rename = "ratio")]
    Ratio,
    /// Things.
    #[serde(rename = "count")]
    Count,
    /// Millions of clock cycles a second.
    #[serde(rename = "MHz")]
    Megahertz,
}

/// Median, least and most of several rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The one in the middle; for an even number of rounds, the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// How many.
    pub rounds: usize,
}

impl Spread {
    /// The spread of at least one round; `None` for no rounds.
    pub fn of(rounds: &[f64]) -> Option<Self> {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (least, most, count) = (*sorted.first()?, *sorted.last()?, sorted.len());
        let median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2.0;
        Some(Self { median, least, most, rounds: count })
    }
}

/// What a number has to reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// No less.
    AtLeast(f64),
    /// No more.
    AtMost(f64),
}

impl Goal {
    /// Whether a number reaches it.
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(goal) => value >= goal,
            Self::AtMost(goal) => value <= goal,
        }
    }
}

/// One thing that a part found, in the order of finding.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "record", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Record {
    /// A measurement.
    Number {
        /// Its name, unique in the part.
        name: String,
        /// What it counts.
        unit: Unit,
        /// The rounds.
        #[serde(flatten)]
        spread: Spread,
        /// The name of the number it is compared with, if there is one.
        #[serde(skip_serializing_if = "Option::is_none")]
        ceiling: Option<String>,
    },
    /// A number that is judged.
    Verdict {
        /// What is judged.
        name: String,
        /// The number.
        value: f64,
        /// What it counts.
        unit: Unit,
        /// What it has to reach.
        goal: Goal,
        /// Whether it does.
        pass: bool,
        /// How it was computed.
        formula: String,
        /// Why it counts neither way, if something that it presumes was not so.
        #[serde(skip_serializing_if = "Option::is_none")]
        not_judged: Option<String>,
    },
    /// A size that followed from the machine.
    Chosen {
        /// What.
        name: String,
        /// How much, in words.
        value: String,
    },
    /// What else there is to say.
    Note {
        /// In words.
        text: String,
    },
}

/// Takes records as they come.
pub struct Report<'a> {
    sink: Box<dyn FnMut(&Record) + 'a>,
}

impl fmt::Debug for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report").finish_non_exhaustive()
    }
}

impl<'a> Report<'a> {
    /// Passes every record to `sink`.
    pub fn new(sink: impl FnMut(&Record) + 'a) -> Self {
        Self { sink: Box::new(sink) }
    }

    /// Reports the rounds of a measurement, and the name of the number it is compared with, if there is one.
    pub(crate) fn number(&mut self, name: impl Into<String>, unit: Unit, rounds: &[f64], ceiling: Option<&str>) {
        if let Some(spread) = Spread::of(rounds) {
            let ceiling = ceiling.map(str::to_owned);
            (self.sink)(&Record::Number { name: name.into(), unit, spread, ceiling });
        }
    }

    pub(crate) fn verdict(&mut self, name: &str, value: f64, unit: Unit, goal: Goal, formula: impl Into<String>) {
        self.verdict_unless(None, name, value, unit, goal, formula);
    }

    /// A verdict that counts neither way if there is a reason.
    pub(crate) fn verdict_unless(
        &mut self,
        not_judged: Option<String>,
        name: &str,
        value: f64,
        unit: Unit,
        goal: Goal,
        formula: impl Into<String>,
    ) {
        let (name, formula, pass) = (name.into(), formula.into(), goal.is_met_by(value));
        (self.sink)(&Record::Verdict { name, value, unit, goal, pass, formula, not_judged });
    }

    pub(crate) fn chosen(&mut self, name: &str, value: impl fmt::Display) {
        (self.sink)(&Record::Chosen { name: name.into(), value: value.to_string() });
    }

    pub(crate) fn note(&mut self, text: impl Into<String>) {
        (self.sink)(&Record::Note { text: text.into() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_and_goals() {
        assert_eq!(Spread::of(&[]), None);
        let spread = Spread::of(&[3.0, 1.0, 2.0]);
        assert_eq!(spread, Some(Spread { median: 2.0, least: 1.0, most: 3.0, rounds: 3 }));
        assert!(Goal::AtLeast(0.9).is_met_by(0.9) && !Goal::AtLeast(0.9).is_met_by(0.89));
        assert!(Goal::AtMost(1.0).is_met_by(1.0) && !Goal::AtMost(1.0).is_met_by(1.01));
        assert_eq!(Spread::of(&[4.0, 1.0]).map(|spread| spread.median), Some(2.5));
        // A number that was not measured is NaN, and reaches no goal.
        assert!(!Goal::AtLeast(0.9).is_met_by(f64::NAN) && !Goal::AtMost(1.0).is_met_by(f64::NAN));
    }
}
