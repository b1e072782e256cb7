//! The text of an answer as it grows: characters that are whole, up to a stop sequence.

/// Looks for stop sequences in text that comes in pieces.
#[derive(Debug)]
pub struct Stops {
    stops: Vec<String>,
    /// Text that may be the beginning of one.
    held: String,
    found: bool,
}

impl Stops {
    /// Looks for these.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops, held: String::new(), found: false }
    }

    /// Whether one was found: what comes behind it is no part of the text.
    pub fn found(&self) -> bool {
        self.found
    }

    /// Adds a piece, and returns what is certainly part of the text.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found {
            return String::new();
        }
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.found = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        // The longest end of the text with which a stop sequence begins.
        let from = self.held.len() - self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(from);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back, when no more comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// The bytes of the longest end of `text` that is a beginning of `stop`, but not all of it.
fn begun(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|len| stop.is_char_boundary(*len) && text.ends_with(&stop[..*len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut looking = Stops::new(stops.iter().map(|stop| (*stop).to_owned()).collect());
        let mut text: String = pieces.iter().map(|piece| looking.push(piece)).collect();
        text.push_str(&looking.finish());
        (text, looking.found())
    }

    #[test]
    fn a_stop_sequence_is_found_wherever_pieces_end() {
        let text = "one two\n\nthree \u{fc}nd four";
        for stop in ["\n\n", "\u{fc}nd", "three \u{fc}nd four", "f"] {
            let at = text.find(stop).unwrap_or_default();
            for first in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
                for second in (first..=text.len()).filter(|at| text.is_char_boundary(*at)) {
                    let pieces = [&text[..first], &text[first..second], &text[second..]];
                    assert_eq!(all(&[stop, "never"], &pieces), (text[..at].to_owned(), true), "{stop:?} {pieces:?}");
                }
            }
        }
    }

    #[test]
    fn without_a_stop_sequence_no_text_is_lost() {
        assert_eq!(all(&[], &["a", "", "b"]), ("ab".to_owned(), false));
        assert_eq!(all(&["aab"], &["a", "a", "a"]), ("aaa".to_owned(), false));
        let mut looking = Stops::new(vec!["xyz".into()]);
        assert_eq!((looking.push("abx"), looking.push("q")), ("ab".into(), "xq".into()));
    }
}
