//! Line charts: values over time, drawn on the page by the chart library.

use serde::Serialize;

use super::bars::{Series, Unit};

/// A chart of values over time.
#[derive(Debug, Serialize)]
pub struct Lines {
    /// Id of the element that the chart is drawn in: a word, until the page adds a number.
    pub id: String,
    pub unit: Unit,
    /// Seconds, in order.
    pub at: Vec<f64>,
    /// Each with a value for each time.
    pub series: Vec<Series>,
}

impl Lines {
    /// Makes a chart without points.
    pub fn new<const N: usize>(id: &str, unit: Unit, series: [&'static str; N]) -> Self {
        let series = series.map(|name| Series { name, values: Vec::new() }).into();
        Self { id: id.to_owned(), unit, at: Vec::new(), series }
    }

    /// Adds a value to each series.
    pub fn push(&mut self, at: f64, values: impl IntoIterator<Item = Option<f64>>) {
        self.at.push(at);
        for (series, value) in self.series.iter_mut().zip(values) {
            series.values.push(value.filter(|value| value.is_finite()));
        }
    }
}
