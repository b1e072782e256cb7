//! The live view.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use outcore::{Error, ErrorKind, Result};
use outcore_mapped::live::Snapshot;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::Paragraph;

use super::ask::Process;
use super::view::{self, Bar, View};

/// Columns of a line's name, and the least of its bar and of what stands behind that.
const NAME: usize = 16;
const BAR: usize = 12;
const TOLD: usize = 34;
/// Names of pairs.
const PAIR: usize = 10;

/// Shows the process until it ends or the user does.
///
/// # Errors
/// Those of the terminal, and of [`Process::look`] but for the process's end.
pub fn watch(process: &Process, first: Snapshot, interval: Duration) -> Result<()> {
    let failed = |cause| Error::io("draw on the terminal", cause).remedy("give --once for text, or --json");
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let mut drawn = |view: &View, first: usize| terminal.draw(|frame| draw(frame, view, first)).map(|_| ());
    let ended = follow(process, first, interval, &mut drawn);
    ratatui::restore();
    match ended {
        Ok(false) => Ok(()),
        Ok(true) => {
            // It is what was waited for.
            drop(writeln!(io::stdout(), "{}", process.ended()));
            Ok(())
        }
        Err(Failed::Terminal(cause)) => Err(failed(cause)),
        Err(Failed::Process(error)) => Err(error),
    }
}

enum Failed {
    Terminal(io::Error),
    Process(Error),
}

/// Returns whether the process has ended.
fn follow(
    process: &Process,
    first: Snapshot,
    interval: Duration,
    drawn: &mut dyn FnMut(&View, usize) -> io::Result<()>,
) -> std::result::Result<bool, Failed> {
    let mut view = View::new(&process.program, first.clone(), &first);
    let (mut looked, mut scrolled) = (Instant::now(), 0_usize);
    loop {
        drawn(&view, scrolled).map_err(Failed::Terminal)?;
        let left = interval.saturating_sub(looked.elapsed());
        if event::poll(left).map_err(Failed::Terminal)? {
            let most = view.lines().len().saturating_sub(1);
            match event::read().map_err(Failed::Terminal)? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match wanted(key) {
                    Wanted::End => return Ok(false),
                    Wanted::Scroll(by) => scrolled = scrolled.saturating_add_signed(by).min(most),
                    Wanted::Nothing => {}
                },
                _ => {}
            }
            if looked.elapsed() < interval {
                continue;
            }
        }
        looked = Instant::now();
        match process.look() {
            Ok(now) => view = View::new(&process.program, now, &view.now),
            Err(error) if error.kind() == ErrorKind::Closed => return Ok(true),
            Err(error) => return Err(Failed::Process(error)),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    End,
    Scroll(isize),
    Nothing,
}

fn wanted(key: KeyEvent) -> Wanted {
    match key.code {
        KeyCode::Char('q') | KeyCode::Esc => Wanted::End,
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Wanted::End,
        KeyCode::Down | KeyCode::Char('j') => Wanted::Scroll(1),
        KeyCode::Up | KeyCode::Char('k') => Wanted::Scroll(-1),
        KeyCode::PageDown | KeyCode::Char(' ') => Wanted::Scroll(10),
        KeyCode::PageUp => Wanted::Scroll(-10),
        KeyCode::Home => Wanted::Scroll(isize::MIN),
        _ => Wanted::Nothing,
    }
}

fn draw(frame: &mut Frame<'_>, view: &View, first: usize) {
    let dim = Style::new().add_modifier(Modifier::DIM);
    let title = Line::from(vec![
        Span::styled(format!(" process {} ", view.now.process), Style::new().add_modifier(Modifier::REVERSED)),
        Span::styled(format!(" {}", view.program), Style::new().add_modifier(Modifier::BOLD)),
    ]);
    let area = frame.area();
    let mut pairs = Vec::new();
    for (name, value) in view.pairs() {
        let mut name = format!(" {name:<PAIR$} ");
        for line in wrapped(&value, usize::from(area.width).saturating_sub(name.len())) {
            pairs.push(Line::from(vec![Span::styled(name.clone(), dim), Span::raw(line)]));
            name = " ".repeat(name.len());
        }
    }
    let height = u16::try_from(pairs.len()).unwrap_or(u16::MAX).min(area.height / 2 + 1);
    let pairs = Paragraph::new(pairs);
    let cells = view.lines().iter().any(view::Line::has_cells);
    let rows = [
        Constraint::Length(1),
        Constraint::Length(height),
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(u16::from(cells)),
        Constraint::Length(1),
    ];
    let [top, middle, _, below, of_cells, bottom] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(title), top);
    frame.render_widget(pairs, middle);
    let hidden = files(frame, below, view, first);
    let said = |sign: char, says: &str, style: Style| {
        [Span::styled(format!(" {sign}"), style), Span::raw(format!(" {says} "))]
    };
    if cells {
        let shades = view::SHADES.into_iter().zip(view::SHADES_SAY);
        let shades = shades.flat_map(|(sign, says)| said(sign, says, used()));
        let legend = [Span::raw(format!(" {}", view::CELLS))].into_iter().chain(shades);
        frame.render_widget(Paragraph::new(Line::from_iter(legend)), of_cells);
    }
    let signs = view::SIGNS.into_iter().zip(view::SIGNS_SAY).zip([used(), ahead(), dim]);
    let mut legend: Vec<_> = signs.flat_map(|((sign, says), style)| said(sign, says, style)).collect();
    let more = if hidden > 0 || first > 0 { format!("  {hidden} more lines: arrows") } else { String::new() };
    legend.push(Span::styled(format!("  q quits{more}"), dim));
    frame.render_widget(Paragraph::new(Line::from(legend)), bottom);
}

/// The words of a text in lines of at most `width`, as far as words are not longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last().map_or(0, |last| last.chars().count());
        match lines.last_mut() {
            Some(line) if last == 0 || last + 1 + word.chars().count() <= width => {
                if last > 0 {
                    line.push(' ');
                }
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

fn used() -> Style {
    Style::new().fg(Color::Blue)
}

fn ahead() -> Style {
    Style::new().fg(Color::Yellow)
}

/// Draws files and their parts, in columns where there is room. Returns how many lines are left out behind.
fn files(frame: &mut Frame<'_>, area: Rect, view: &View, first: usize) -> usize {
    let lines = view.lines();
    let lines = lines.get(first..).unwrap_or_default();
    let cells = |line: &view::Line| if let Bar::Cells(cells) = &line.bar { cells.len() } else { BAR };
    let least = NAME + TOLD + lines.iter().map(cells).max().unwrap_or(BAR) + 3;
    let (height, width) = (usize::from(area.height), usize::from(area.width));
    if height == 0 || width == 0 {
        return lines.len();
    }
    let columns = lines.len().div_ceil(height).min(width / least).max(1);
    let each = Layout::horizontal(vec![Constraint::Ratio(1, columns as u32); columns]).split(area);
    for (column, lines) in each.iter().zip(lines.chunks(height)) {
        let bar = usize::from(column.width).saturating_sub(NAME + TOLD + 3).max(BAR);
        let text = lines.iter().map(|line| drawn(line, bar));
        frame.render_widget(Paragraph::new(Text::from_iter(text)), *column);
    }
    lines.len().saturating_sub(columns * height)
}

fn drawn(line: &view::Line, bar: usize) -> Line<'static> {
    let name: String = format!("{}{}", "  ".repeat(line.depth), line.name).chars().take(NAME).collect();
    let mut spans = vec![Span::raw(format!(" {name:<NAME$} "))];
    let mut width = 0;
    for (at, (sign, count)) in line.bar.parts(bar).into_iter().enumerate() {
        let style = match (&line.bar, at) {
            (Bar::Held(_), 1) => ahead(),
            (Bar::Held(_), 2) => Style::new().add_modifier(Modifier::DIM),
            (Bar::Held(_) | Bar::Cells(_), _) => used(),
        };
        width += count;
        spans.push(Span::styled(std::iter::repeat_n(sign, count).collect::<String>(), style));
    }
    spans.push(Span::raw(format!("{} {}", " ".repeat(bar.saturating_sub(width)), line.told)));
    Line::from(spans)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::view::tests::{made, plain};
    use super::*;

    fn shown(width: u16, height: u16, first: usize) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &made(), first)).unwrap();
        plain(&terminal.backend().to_string())
    }

    #[test]
    fn a_view_is_drawn_in_any_size() {
        let text = shown(120, 30, 0);
        for part in ["77", "llama-cli -m a.gguf", "700.0 MiB of 900.0 MiB", "layer 2", ".=#+", "q quits", "read ahead"]
        {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains("more lines"), "{text}");
        // Every sign is explained.
        for width in [80, 120] {
            let text = shown(width, 30, 0);
            for legend in
                ["# used  = read ahead  . not in memory   q quits", "of each cell in memory: . none  - to 1/3"]
            {
                assert!(text.contains(legend), "{legend:?} is not in\n{text}");
            }
            assert!(text.contains("= to 2/3  + more  # all"), "{text}");
        }
        // Nine lines of files do not fit; what is above can be left.
        assert!(shown(80, 16, 0).contains("more lines"));
        assert!(shown(80, 16, 4).contains("layer 2"));
        for (width, height, first) in [(1, 1, 0), (20, 5, 0), (80, 3, 2), (300, 100, 0), (80, 24, 99)] {
            shown(width, height, first);
        }
    }

    #[test]
    fn long_values_are_wrapped() {
        assert_eq!(wrapped("a bb ccc dddd", 6), ["a bb", "ccc", "dddd"]);
        assert_eq!(wrapped("abcdefgh i", 3), ["abcdefgh", "i"]);
        assert_eq!(wrapped("", 0), [""]);
    }

    #[test]
    fn keys() {
        let of = |code, modifiers| wanted(KeyEvent::new(code, modifiers));
        assert_eq!(of(KeyCode::Char('q'), KeyModifiers::NONE), Wanted::End);
        assert_eq!(of(KeyCode::Char('c'), KeyModifiers::CONTROL), Wanted::End);
        assert_eq!(of(KeyCode::Char('c'), KeyModifiers::NONE), Wanted::Nothing);
        assert_eq!(of(KeyCode::PageDown, KeyModifiers::NONE), Wanted::Scroll(10));
    }
}
