//! Bars: one for each row of a table, drawn on the page by the chart library.

use serde::Serialize;

/// What the bars' lengths are.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Seconds,
    Bytes,
    /// Bytes a second.
    Rate,
    /// A part of 1, as a ratio.
    Ratio,
    /// A part of 1, in percent.
    Share,
}

/// A chart of lying bars.
#[derive(Debug, Serialize)]
pub struct Bars {
    /// Of the element that it is drawn in: a word until the page numbers it.
    pub id: String,
    pub unit: Unit,
    pub labels: Vec<String>,
    /// What is written behind each bar; where it is empty, its length.
    pub told: Vec<String>,
    /// From the widest bar, which lies behind the others, to the narrowest.
    pub series: Vec<Series>,
}

/// A bar of each label.
#[derive(Debug, Serialize)]
pub struct Series {
    pub name: &'static str,
    /// None where it is not known.
    pub values: Vec<Option<f64>>,
}

impl Bars {
    /// A chart without bars.
    pub fn new<const N: usize>(id: &str, unit: Unit, series: [&'static str; N]) -> Self {
        let series = series.map(|name| Series { name, values: Vec::new() }).into();
        Self { id: id.to_owned(), unit, labels: Vec::new(), told: Vec::new(), series }
    }

    /// One more label, with a value in each series.
    pub fn push(&mut self, label: impl Into<String>, values: impl IntoIterator<Item = Option<f64>>) {
        self.push_told(label, "", values);
    }

    /// As [`push`](Self::push), with what is written behind it.
    pub fn push_told(
        &mut self,
        label: impl Into<String>,
        told: impl Into<String>,
        values: impl IntoIterator<Item = Option<f64>>,
    ) {
        self.labels.push(label.into());
        self.told.push(told.into());
        for (series, value) in self.series.iter_mut().zip(values) {
            series.values.push(value.filter(|value| value.is_finite()));
        }
    }

    /// The chart, if there is something in it.
    pub fn some(self) -> Option<Self> {
        if self.labels.is_empty() { None } else { Some(self) }
    }
}
