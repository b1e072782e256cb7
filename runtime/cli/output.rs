//! Aligned tables and numbers with units.

use std::time::Duration;

use outcore::Bytes;

/// The side of its column on which a cell is aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

/// Rows of cells, printed with aligned columns.
#[derive(Debug)]
pub struct Table {
    sides: Vec<Side>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table whose first row is `head`.
    pub fn new(head: &[(&str, Side)]) -> Self {
        let rows = vec![head.iter().map(|(name, _)| (*name).to_owned()).collect()];
        Self { sides: head.iter().map(|(_, side)| *side).collect(), rows }
    }

    /// Makes a table of two columns without a head: names and values.
    pub fn pairs() -> Self {
        Self { sides: vec![Side::Left, Side::Left], rows: Vec::new() }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub fn pair(&mut self, name: &str, value: impl Into<String>) {
        self.row([name.to_owned(), value.into()]);
    }

    /// Returns the lines, indented by two.
    pub fn text(&self) -> String {
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.sides.len()).map(width).collect();
        let mut out = String::new();
        for row in &self.rows {
            let mut line = String::from(" ");
            for ((cell, width), side) in row.iter().zip(&widths).zip(&self.sides) {
                let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
                line.push(' ');
                match side {
                    Side::Left => line.extend([cell.as_str(), &pad]),
                    Side::Right => line.extend([pad.as_str(), cell]),
                }
                line.push(' ');
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// Formats a number of any size with about three digits.
pub fn digits(n: f64) -> String {
    match n {
        n if n >= 100.0 => format!("{n:.0}"),
        n if n >= 10.0 => format!("{n:.1}"),
        n if n >= 1.0 => format!("{n:.2}"),
        n if n >= 0.01 => format!("{n:.3}"),
        0.0 => "0".to_owned(),
        n => format!("{n:.1e}"),
    }
}

pub fn size(bytes: u64) -> String {
    Bytes::new(bytes).to_string()
}

pub fn rate(bytes_per_second: u64) -> String {
    format!("{}/s", Bytes::new(bytes_per_second))
}

pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

pub fn microseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e7).round() / 10.0
}

/// Makes a name from a file safe for a terminal: escapes control characters, which could move the cursor or change
/// colours.
pub fn printable(name: &str) -> String {
    name.chars().flat_map(|c| if c.is_control() { c.escape_debug().collect::<Vec<_>>() } else { vec![c] }).collect()
}
