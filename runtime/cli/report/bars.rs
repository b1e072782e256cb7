//! Bar charts: a bar for each row of a table, drawn on the page by the chart library.

use serde::Serialize;

/// The unit of the bars' lengths.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Seconds,
    Bytes,
    /// Bytes a second.
    Rate,
    /// A part of 1, shown as a ratio.
    Ratio,
    /// A part of 1, shown in percent.
    Share,
}

/// A chart of horizontal bars.
#[derive(Debug, Serialize)]
pub struct Bars {
    /// Id of the element that the chart is drawn in: a word, until the page adds a number.
    pub id: String,
    pub unit: Unit,
    pub labels: Vec<String>,
    /// The text behind each bar; if empty, its length is shown.
    pub told: Vec<String>,
    /// Series from the widest bar, which is drawn first, to the narrowest.
    pub series: Vec<Series>,
}

/// A series: a bar for each label.
#[derive(Debug, Serialize)]
pub struct Series {
    pub name: &'static str,
    /// The lengths; `None` if not known.
    pub values: Vec<Option<f64>>,
}

impl Bars {
    /// Makes a chart without bars.
    pub fn new<const N: usize>(id: &str, unit: Unit, series: [&'static str; N]) -> Self {
        let series = series.map(|name| Series { name, values: Vec::new() }).into();
        Self { id: id.to_owned(), unit, labels: Vec::new(), told: Vec::new(), series }
    }

    /// Adds a label with a value in each series.
    pub fn push(&mut self, label: impl Into<String>, values: impl IntoIterator<Item = Option<f64>>) {
        self.push_told(label, "", values);
    }

    /// As [`push`](Self::push), with the text behind the bar.
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

    /// Returns the chart unless it is empty.
    pub fn some(self) -> Option<Self> {
        if self.labels.is_empty() { None } else { Some(self) }
    }
}
