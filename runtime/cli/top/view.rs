//! What is shown, in words.

use outcore_mapped::live::{Counts, Held, HeldExperts, Snapshot, rate};
use serde::Serialize;

use crate::output::{Side, Table, percent, printable, size};
use crate::printed::Report;

/// A process at one time, and what happened in the interval before.
#[derive(Debug, Serialize)]
pub struct View {
    pub program: String,
    #[serde(flatten)]
    pub now: Snapshot,
    /// What happened in the last interval; `at` is its length.
    pub last: Counts,
}

/// Signs of a bar: used, read ahead, not in memory.
pub const SIGNS: [char; 3] = ['\u{2588}', '\u{2592}', '\u{b7}'];
/// Signs of a cell, from nothing in memory to all.
pub const SHADES: [char; 5] = ['\u{b7}', '\u{2591}', '\u{2592}', '\u{2593}', '\u{2588}'];
/// What the signs of a bar say.
pub const SIGNS_SAY: [&str; 3] = ["used", "read ahead", "not in memory"];
/// What the signs of cells say, in a line that a terminal of 80 columns has room for. A cell is an expert, or a part of
/// a file.
pub const CELLS: &str = "of each cell in memory:";
pub const SHADES_SAY: [&str; 5] = ["none", "to 1/3", "to 2/3", "more", "all"];
/// Width of a bar in the text.
const BAR: usize = 40;

impl View {
    pub fn new(program: &str, now: Snapshot, before: &Snapshot) -> Self {
        let last = now.counts.since(&before.counts);
        Self { program: program.to_owned(), now, last }
    }

    /// Names and values of what is no part of a file.
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let Self { now, last, .. } = self;
        let (counts, memory) = (&now.counts, &now.memory);
        let mut all = Vec::new();
        all.push((
            "memory",
            match memory.process_limit_bytes {
                Some(limit) => format!("{} of {}", size(memory.resident_bytes), size(limit)),
                None => format!("{}, pages included; no limit for the whole process", size(memory.resident_bytes)),
            },
        ));
        all.push((
            "pages",
            format!(
                "{} of {} in use, {} each; policy {}{}",
                size(counts.used_bytes),
                size(counts.budget_bytes),
                size(now.page_bytes),
                now.policy,
                if now.planned { ", which follows an order" } else { "" },
            ),
        ));
        let order = now.told_of_order();
        if !order.is_empty() {
            all.push(("order", printable(&order)));
        }
        let told = |found: Option<f64>| found.map_or("nothing".to_owned(), rate);
        all.push((
            "read",
            format!(
                "{} now ({} while reading); {} in all",
                told(last.mean_rate()),
                told(last.read_rate()),
                size(counts.read_bytes)
            ),
        ));
        let ratio = |found: Option<f64>| found.map_or("-".to_owned(), |found| format!("{found:.2}"));
        let best = now.optimum.map_or(String::new(), |optimum| {
            format!(
                "; best possible {:.2} (of the first {} uses, where there were {:.2})",
                optimum.best, optimum.uses, optimum.hit_ratio
            )
        });
        all.push(("hit ratio", format!("{} now, {} in all{best}", ratio(last.hit_ratio()), ratio(counts.hit_ratio()))));
        let second = |count: u64| per_second(count, last.at);
        all.push((
            "uses",
            format!(
                "{} a second: {} there, {} read ahead, {} on their way, {} absent",
                second(last.uses),
                second(last.hits),
                second(last.prefetched),
                second(last.late),
                second(last.faults)
            ),
        ));
        all.push(("evictions", format!("{} a second; {} in all", second(last.evictions), counts.evictions)));
        let waited: f64 = last.stalls.iter().map(|stall| stall.seconds).sum();
        let causes =
            last.stalls.iter().map(|stall| format!("{} x {}, {:.3} s", stall.count, stall.cause, stall.seconds));
        let causes = Vec::from_iter(causes).join("; ");
        let waited = match causes.is_empty() {
            true => format!("for nothing in {:.1} s", last.at),
            false => format!("{waited:.3} s in {:.1} s: {causes}", last.at),
        };
        all.push(("waited", waited));
        let experts = now.told_of_experts();
        if !experts.is_empty() {
            all.push(("experts", experts));
        }
        all
    }

    /// A line for each file and each of its parts: name, bar, and what it says.
    pub fn lines(&self) -> Vec<Line> {
        let mut all = Vec::new();
        for file in &self.now.files {
            all.push(Line::new(0, printable(&file.name), Bar::Held(file.held), &file.held));
            // Parts say more than stretches of the file.
            if file.parts.is_empty() {
                all.push(Line::new(1, "pages".to_owned(), Bar::Cells(file.cells.clone()), &file.held));
            }
            for part in &file.parts {
                // Of some layers a file has experts alone.
                let alone = part.held.bytes == 0 && part.experts.is_some();
                if !alone {
                    all.push(Line::new(1, printable(&part.name), Bar::Held(part.held), &part.held));
                }
                if let Some(HeldExperts { count, held, cells }) = &part.experts {
                    let (depth, name) = match alone {
                        true => (1, format!("{}, {count} experts", printable(&part.name))),
                        false => (2, format!("{count} experts")),
                    };
                    all.push(Line::new(depth, name, Bar::Cells(cells.clone()), held));
                }
            }
        }
        all
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    pub name: String,
    pub bar: Bar,
    pub told: String,
    /// What the bar's colours say where there are colours.
    pub ahead: String,
    pub depth: usize,
}

impl Line {
    fn new(depth: usize, name: String, bar: Bar, held: &Held) -> Self {
        let told = format!("{} of {} ({})", size(held.there()), size(held.bytes), percent(held.there(), held.bytes));
        let ahead = if held.ahead > 0 { format!(", {} of it read ahead", size(held.ahead)) } else { String::new() };
        Self { name, bar, told, ahead, depth }
    }

    pub fn has_cells(&self) -> bool {
        matches!(self.bar, Bar::Cells(_))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Bar {
    Held(Held),
    /// Percent of each cell.
    Cells(Vec<u8>),
}

impl Bar {
    /// Parts of the bar with their signs, in order: used, read ahead, absent. Cells have one part each.
    pub fn parts(&self, width: usize) -> Vec<(char, usize)> {
        match self {
            Self::Held(held) => {
                let cut = |bytes: u64| {
                    let part = u128::from(bytes) * width as u128;
                    // What is there at all is seen.
                    let rounded =
                        (part + u128::from(held.bytes) / 2).checked_div(held.bytes.into()).unwrap_or(0) as usize;
                    if bytes > 0 { rounded.max(1) } else { 0 }
                };
                let used = cut(held.used).min(width);
                let ahead = cut(held.ahead).min(width - used);
                Vec::from_iter(SIGNS.into_iter().zip([used, ahead, width - used - ahead]))
            }
            Self::Cells(cells) => cells.iter().take(width.max(1)).map(|percent| (shade(*percent), 1)).collect(),
        }
    }

    fn text(&self, width: usize) -> String {
        self.parts(width).into_iter().flat_map(|(sign, count)| std::iter::repeat_n(sign, count)).collect()
    }
}

fn shade(percent: u8) -> char {
    match percent {
        0 => SHADES[0],
        1..=33 => SHADES[1],
        34..=66 => SHADES[2],
        67..=99 => SHADES[3],
        _ => SHADES[4],
    }
}

fn per_second(count: u64, seconds: f64) -> String {
    if seconds > 0.0 { format!("{:.0}", count as f64 / seconds) } else { "-".to_owned() }
}

impl Report for View {
    fn text(&self) -> String {
        let mut text = format!("{} ({})\n", self.program, self.now.process);
        let mut pairs = Table::pairs();
        self.pairs().into_iter().for_each(|(name, value)| pairs.pair(name, value));
        text += &pairs.text();
        let mut table = Table::new(&[("", Side::Left); 3]);
        let lines = self.lines();
        // Cells are as many as they are.
        let wide = |line: &Line| if let Bar::Cells(cells) = &line.bar { cells.len() } else { BAR };
        let width = lines.iter().map(wide).max().unwrap_or(BAR);
        let cells = lines.iter().any(Line::has_cells);
        for line in lines {
            table.row([
                format!("{}{}", "  ".repeat(line.depth), line.name),
                line.bar.text(width),
                line.told + &line.ahead,
            ]);
        }
        let said = |signs: &[char], say: &[&str]| {
            Vec::from_iter(signs.iter().zip(say).map(|(sign, say)| format!("{sign} {say}"))).join("  ")
        };
        text += &format!("\n  {}\n", said(&SIGNS, &SIGNS_SAY));
        if cells {
            text += &format!("  {CELLS} {}\n", said(&SHADES, &SHADES_SAY));
        }
        text += table.text().trim_start_matches('\n');
        text
    }
}

#[cfg(test)]
pub mod tests {
    use outcore_mapped::live::{Experts, File, Memory, Optimum, Order, Part, Routing, Stall, Whole};

    use super::*;

    pub fn made() -> View {
        let counts = |at, uses, hits, read_bytes| Counts {
            at,
            uses,
            hits,
            faults: uses - hits,
            read_bytes,
            read_seconds: at / 2.0,
            budget_bytes: 64 << 20,
            used_bytes: 60 << 20,
            stalls: vec![Stall { cause: "disk fault".into(), count: uses, seconds: at / 4.0 }],
            ..Counts::default()
        };
        let held =
            |bytes: u64, used: u64, ahead: u64| Held { bytes: bytes << 20, used: used << 20, ahead: ahead << 20 };
        let parts = (0..3).map(|layer| Part {
            name: format!("layer {layer}"),
            held: held(10, 5, 1),
            experts: Some(HeldExperts { count: 4, held: held(20, 10, 0), cells: vec![0, 50, 100, 70] }),
        });
        let file = |name: &str, parts| File {
            name: name.into(),
            whole: Whole {
                id: name.len() as u64,
                ordered: 1,
                files: 1,
                mapped: 1,
                order: Order::OfHeaders,
                first: (0, name.len() as u64),
                uses: 0,
                alone: None,
            },
            held: held(100, 50, 10),
            cells: vec![0, 100],
            parts,
        };
        let now = Snapshot {
            process: 77,
            page_bytes: 2 << 20,
            policy: "model".into(),
            planned: true,
            memory: Memory { process_limit_bytes: Some(900 << 20), resident_bytes: 700 << 20, frames_bytes: 64 << 20 },
            counts: counts(12.0, 3000, 2000, 5 << 30),
            optimum: Some(Optimum { uses: 2000, hit_ratio: 0.6, best: 0.75 }),
            routing: Routing::Read,
            experts: Experts { hints: 24, told: 96, touched: 3 },
            files: vec![file("a\u{1b}.gguf", parts.collect()), file("plain", Vec::new())],
        };
        let before = Snapshot { counts: counts(10.0, 2000, 1500, 1 << 30), ..Snapshot::default() };
        View::new("llama-cli -m a.gguf", now, &before)
    }

    /// Signs of bars and cells as ones that everybody can type.
    pub fn plain(text: &str) -> String {
        let signs = SIGNS.into_iter().zip("#=.".chars()).chain(SHADES.into_iter().zip(".-=+#".chars()));
        signs.fold(text.to_owned(), |text, (sign, plain)| text.replace(sign, &plain.to_string()))
    }

    #[test]
    fn all_of_it_is_said() {
        let text = plain(&made().text());
        for part in [
            "llama-cli -m a.gguf (77)\n",
            "700.0 MiB of 900.0 MiB",
            "60.0 MiB of 64.0 MiB in use, 2.0 MiB each; policy model, which follows an order",
            "The order of use of a\\u{1b}.gguf is that of the layers, by the headers. The order of use of plain is",
            "2.0 GiB/s now (4.0 GiB/s while reading); 5.0 GiB in all",
            "0.50 now, 0.67 in all; best possible 0.75 (of the first 2000 uses, where there were 0.60)",
            "500 a second: 250 there, 0 read ahead, 0 on their way, 250 absent",
            "0.500 s in 2.0 s: 1000 x disk fault, 0.500 s",
            "The router's choice was read 24 times, of 96 experts; 3 times an expert came by a fault.",
            "a\\u{1b}.gguf   ####################====................  60.0 MiB of 100.0 MiB (60.0 %), 10.0 MiB of it",
            "      4 experts  .=#+",
            "    pages        .#",
            "\n  # used  = read ahead  . not in memory\n",
            "  of each cell in memory: . none  - to 1/3  = to 2/3  + more  # all\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        // Before anything happened.
        let nothing = View::new("p", Snapshot::default(), &Snapshot::default()).text();
        assert!(nothing.contains("for nothing in 0.0 s") && nothing.contains("- now, - in all"), "{nothing}");
    }

    #[test]
    fn what_is_there_at_all_is_seen() {
        let of = |bytes, used, ahead, width| plain(&Bar::Held(Held { bytes, used, ahead }).text(width));
        assert_eq!(of(1000, 1, 1, 10), "#=........");
        assert_eq!(of(1000, 1000, 0, 10), "##########");
        assert_eq!(of(1000, 999, 1, 10), "##########");
        assert_eq!(of(0, 0, 0, 3), "...");
        assert_eq!(of(u64::MAX, u64::MAX / 2, 0, 4), "##..");
    }
}
