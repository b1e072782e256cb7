//! Draws miss ratios by capacity.

use std::io::Write;

use outcore::{Error, ErrorKind, Result};
use outcore_lab::output::NewFile;
use plotters::prelude::*;

use super::comparison::{Found, Ratio};
use super::output::printable;

const SIZE: (u32, u32) = (1000, 620);

/// Draws LRU's curve, and a line through the capacities for the optimum and for each policy.
pub fn write(found: &Found, file: &NewFile) -> Result<()> {
    let mut text = String::new();
    draw(found, &mut text).map_err(|cause| {
        Error::new(ErrorKind::Internal, format!("the drawing was not made: {cause}")).remedy("leave --svg out")
    })?;
    let mut out = file.beside()?;
    out.write_all(text.as_bytes()).map_err(|cause| file.failed(cause))?;
    file.put(out)
}

fn draw(found: &Found, text: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let area = SVGBackend::with_string(text, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let most = found.capacities.iter().map(|capacity| capacity.pages.get()).max().unwrap_or(1).max(found.pages);
    let mut chart = ChartBuilder::on(&area)
        .caption(printable(&found.trace), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(54)
        .build_cartesian_2d(0..most, 0.0..1.0)?;
    chart.configure_mesh().x_desc("capacity in pages").y_desc("miss ratio").light_line_style(WHITE).draw()?;
    let curve = found.lru.iter().map(|point| (point.pages, 1.0 - point.hit_ratio));
    let grey = RGBColor(150, 150, 150);
    chart
        .draw_series(LineSeries::new(std::iter::once((0, 1.0)).chain(curve), grey.stroke_width(4)))?
        .label("lru, every capacity")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], grey.stroke_width(4)));
    let mut line = |name: &str, points: Vec<(u32, f64)>, colour: RGBColor, width: u32| {
        let style = ShapeStyle::from(colour).stroke_width(width);
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        Ok::<(), Box<dyn std::error::Error>>(())
    };
    let mut capacities: Vec<_> = found.capacities.iter().collect();
    capacities.sort_by_key(|capacity| capacity.pages);
    let misses = |ratio: &Ratio| 1.0 - ratio.hit_ratio;
    let best = capacities.iter().map(|capacity| (capacity.pages.get(), misses(&capacity.optimum)));
    line("optimum", best.collect(), BLACK, 3)?;
    let names = capacities.first().map(|capacity| capacity.policies.as_slice()).unwrap_or_default();
    for (at, policy) in names.iter().enumerate() {
        let of = |capacity: &&super::comparison::Capacity| {
            let outcome = capacity.policies.get(at)?;
            Some((capacity.pages.get(), misses(&outcome.ratio)))
        };
        let HSLColor(hue, saturation, light) =
            HSLColor(at as f64 / names.len() as f64, 0.75, 0.4 + 0.1 * (at % 2) as f64);
        let (r, g, b) = HSLColor(hue, saturation, light).to_backend_color().rgb;
        line(&policy.policy, capacities.iter().filter_map(of).collect(), RGBColor(r, g, b), 2)?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .draw()?;
    area.present()?;
    Ok(())
}
