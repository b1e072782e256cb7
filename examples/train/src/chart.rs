//! Draws the losses of all steps.

use plotters::prelude::*;

const SIZE: (u32, u32) = (1000, 520);

/// The losses as a picture in SVG: a line over the steps, which begin with 1. Losses that are not finite are left out.
///
/// # Errors
/// What the drawing library says.
pub fn svg(losses: &[f32]) -> Result<String, Box<dyn std::error::Error>> {
    let points: Vec<(u64, f64)> = (1..).zip(losses).map(|(step, loss)| (step, f64::from(*loss))).collect();
    let points: Vec<(u64, f64)> = points.into_iter().filter(|(_, loss)| loss.is_finite()).collect();
    let least = points.iter().map(|(_, loss)| *loss).reduce(f64::min).unwrap_or(0.0);
    let most = points.iter().map(|(_, loss)| *loss).reduce(f64::max).unwrap_or(1.0);
    // One value alone would have an axis without a length.
    let room = ((most - least) / 20.0).max(most.abs() / 1000.0).max(1e-6);
    let steps = losses.len().max(2) as u64;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(64)
            .build_cartesian_2d(1..steps, least - room..most + room)?;
        chart.configure_mesh().x_desc("step").y_desc("loss").light_line_style(WHITE).draw()?;
        chart.draw_series(LineSeries::new(points, BLUE.stroke_width(2)))?;
        area.present()?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::svg;

    #[test]
    fn whatever_the_losses_are_there_is_a_picture() {
        for losses in
            [vec![], vec![5.5], vec![2.0; 9], vec![f32::NAN, 1.0], vec![f32::INFINITY; 3], vec![0.0, -1e30, 1e30]]
        {
            let text = svg(&losses).unwrap();
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{losses:?}");
        }
        let text = svg(&(0..500).map(|step| 5.0 - step as f32 / 200.0).collect::<Vec<_>>()).unwrap();
        assert!(text.contains("polyline") && text.contains("loss") && text.contains("step"), "{text}");
    }
}
