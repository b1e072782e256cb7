//! Texts with one use a line: an id, or columns of which one is the id and one may say whether the use reads or writes.

use std::collections::HashMap;
use std::io::{self, BufRead, Read};

use csv::{ByteRecord, ReaderBuilder};

use super::forms::{Column, OpColumn, failed};
use super::{LINE_BYTES_MAX, Progress, TraceOptions, TraceWriter, input, tell};
use crate::error::{Error, ErrorKind, Result};

/// What columns of ids are called, in lower case.
const IDS: [&str; 12] =
    ["id", "obj_id", "object_id", "objid", "object id", "obj-id", "key", "block", "block_id", "page", "lbn", "lba"];
/// What columns are called that tell reads from writes.
const OPS: [&str; 4] = ["op", "operation", "rw", "type"];

/// What uses do that write their page; the first are libCacheSim's names.
const WRITES: [&str; 14] = [
    "set",
    "add",
    "cas",
    "replace",
    "append",
    "prepend",
    "incr",
    "decr",
    "update",
    "write",
    "w",
    "put",
    "insert",
    "overwrite",
];
const READS: [&str; 7] = ["get", "gets", "read", "r", "lookup", "fetch", "nop"];
/// What takes a page away, which is no use of it.
const REMOVALS: [&str; 4] = ["delete", "remove", "evict", "del"];

/// The longest id, in bytes: each different text is kept.
const ID_BYTES_MAX: usize = 4096;
/// The most columns.
const COLUMNS_MAX: usize = 1024;

/// What the lines have.
struct Columns {
    id: usize,
    op: Option<usize>,
}

pub(super) fn read(
    input: impl BufRead,
    name: &str,
    options: &TraceOptions,
    progress: Progress<'_>,
) -> Result<TraceWriter> {
    let mut lines = Lines::of(input, name)?;
    let empty = |what: &str| {
        Error::new(ErrorKind::Format, format!("the trace {name} has no {what}")).remedy("give one id a line")
    };
    let (mut record, mut second) = (ByteRecord::new(), ByteRecord::new());
    if !lines.next(&mut record)? {
        return Err(empty("ids"));
    }
    let has_second = lines.next(&mut second)?;
    let header = is_header(&record, has_second.then_some(&second));
    let columns = Columns::of(&record, header, name, options)?;
    let mut ids = Ids::default();
    let mut writer = TraceWriter::new(["page"]);
    // The second line has been read, and comes next.
    let (mut more, mut ahead) = (!header || has_second, has_second);
    if header {
        (record, ahead) = (std::mem::take(&mut second), false);
    }
    while more {
        tell(progress, writer.uses());
        columns.take(&record, &mut ids, &mut writer, name)?;
        more = if std::mem::take(&mut ahead) {
            record = std::mem::take(&mut second);
            true
        } else {
            lines.next(&mut record)?
        };
    }
    if writer.uses() == 0 {
        return Err(empty("uses"));
    }
    Ok(writer)
}

fn is_number(field: &[u8]) -> bool {
    std::str::from_utf8(field).is_ok_and(|text| text.parse::<f64>().is_ok())
}

fn lower(field: &[u8]) -> String {
    String::from_utf8_lossy(field).trim().to_lowercase()
}

/// Whether the first line names the columns: by a name that columns of ids have, or, where there are several, because
/// it has no number and the second line has one.
fn is_header(first: &ByteRecord, second: Option<&ByteRecord>) -> bool {
    let named = first.iter().any(|field| IDS.contains(&&*lower(field)));
    let numbers = |record: &ByteRecord| record.iter().any(is_number);
    // Of one column, a text before a number may well be an id.
    named || (first.len() > 1 && !numbers(first) && second.is_some_and(numbers))
}

impl Columns {
    fn of(first: &ByteRecord, header: bool, name: &str, options: &TraceOptions) -> Result<Self> {
        if first.len() > COLUMNS_MAX {
            let what = format!("the trace {name} has {} columns, more than {COLUMNS_MAX}", first.len());
            return Err(Error::new(ErrorKind::Format, what).remedy("give the column of ids alone, one id a line"));
        }
        let names: Vec<String> = first.iter().map(lower).collect();
        let wrong = |what: String| Error::new(ErrorKind::InvalidArgument, what);
        let all = || {
            let (count, names) = (names.len(), names.join(", "));
            if header {
                format!("it has {count}: {names}")
            } else {
                format!("it has {count}, and no line with their names")
            }
        };
        let find = |column: &Column| {
            let found = match column {
                Column::Number(number) => Some(number.get() as usize - 1).filter(|at| *at < names.len()),
                Column::Name(wanted) if header => names.iter().position(|name| *name == wanted.to_lowercase()),
                Column::Name(_) => None,
            };
            found.ok_or_else(|| wrong(format!("the trace {name} has no column {column}")).remedy(all()))
        };
        let called = |known: &[&str]| names.iter().position(|name| header && known.contains(&name.as_str()));
        let id = match &options.column {
            Some(column) => find(column)?,
            None if names.len() == 1 => 0,
            None => called(&IDS).ok_or_else(|| {
                wrong(format!("the trace {name} has several columns, and none is known to have ids"))
                    .remedy(format!("say which column; {}", all()))
            })?,
        };
        let op = match &options.op_column {
            OpColumn::Column(column) => Some(find(column)?),
            OpColumn::Usual => called(&OPS).filter(|op| *op != id),
            OpColumn::None => None,
        };
        let op = op.filter(|_| !options.read_only);
        Ok(Self { id, op })
    }

    fn take(&self, record: &ByteRecord, ids: &mut Ids, writer: &mut TraceWriter, name: &str) -> Result<()> {
        let line = record.position().map_or(0, csv::Position::line);
        let bad = |what: String| Error::new(ErrorKind::Format, format!("line {line} of the trace {name} {what}"));
        let field = |at: usize| {
            let field = record.get(at).map(<[u8]>::trim_ascii).filter(|field| !field.is_empty());
            field.ok_or_else(|| {
                bad(format!("has nothing in column {}", at + 1)).remedy("correct the line, or leave it out")
            })
        };
        let write = match self.op {
            None => false,
            Some(at) => {
                let op = lower(field(at)?);
                let is = |known: &[&str]| known.contains(&op.as_str());
                if is(&REMOVALS) {
                    return Ok(());
                }
                if !is(&WRITES) && !is(&READS) {
                    let what = format!("does {op:?}, of which it is not known whether it reads or writes");
                    let remedy =
                        format!("known are {}, {}; or name another column", READS.join(", "), WRITES.join(", "));
                    return Err(bad(what).remedy(remedy));
                }
                is(&WRITES)
            }
        };
        let text = field(self.id)?;
        if text.len() > ID_BYTES_MAX {
            return Err(
                bad(format!("has an id of {} bytes, more than {ID_BYTES_MAX}", text.len())).remedy("shorten the ids")
            );
        }
        let id = ids.of(text);
        if write { writer.written(id, || 0) } else { writer.used(id, || 0) }
    }
}

/// Numbers ids, which are any text. Most are decimal numbers, which take less memory.
#[derive(Default)]
struct Ids {
    numbers: HashMap<u64, u64>,
    texts: HashMap<Box<[u8]>, u64>,
}

impl Ids {
    fn of(&mut self, text: &[u8]) -> u64 {
        let next = (self.numbers.len() + self.texts.len()) as u64;
        // "007" and "7" are two ids.
        let usual = text.iter().all(u8::is_ascii_digit) && (text == b"0" || text.first() != Some(&b'0'));
        let number = || std::str::from_utf8(text).ok()?.parse::<u64>().ok();
        if let Some(number) = usual.then(number).flatten() {
            return *self.numbers.entry(number).or_insert(next);
        }
        match self.texts.get(text) {
            Some(id) => *id,
            None => *self.texts.entry(text.into()).or_insert(next),
        }
    }
}

/// A text's lines as fields.
struct Lines<'a, R> {
    reader: csv::Reader<Bounded<io::Chain<io::Cursor<Vec<u8>>, R>>>,
    /// Lines before the first one of the reader.
    skipped: u64,
    /// Fields lie one or more spaces apart.
    spaces: bool,
    name: &'a str,
}

impl<'a, R: BufRead> Lines<'a, R> {
    fn of(mut text: R, name: &'a str) -> Result<Self> {
        // The first line that is no comment tells what is between fields.
        let (mut first, mut skipped) = (Vec::new(), 0);
        loop {
            let read = input::line(&mut text, &mut first).map_err(|cause| failed(name, cause))?;
            let line = first.trim_ascii();
            if read == 0 || !(line.is_empty() || line.starts_with(b"#")) {
                break;
            }
            skipped += 1;
        }
        let line = first.trim_ascii();
        let delimiter = [b',', b'\t', b';', b' '].into_iter().find(|delimiter| line.contains(delimiter));
        // Fields are not quoted: a quote would hide the end of a line, and so of the longest one.
        let reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .quoting(false)
            .comment(Some(b'#'))
            .delimiter(delimiter.unwrap_or(b','))
            .from_reader(Bounded { inner: io::Cursor::new(first).chain(text), line: 0 });
        Ok(Self { reader, skipped, spaces: delimiter == Some(b' '), name })
    }

    fn next(&mut self, into: &mut ByteRecord) -> Result<bool> {
        let line = self.skipped + self.reader.position().line();
        let read = self.reader.read_byte_record(into).map_err(|error| match error.into_kind() {
            csv::ErrorKind::Io(cause) if cause.kind() == io::ErrorKind::FileTooLarge => {
                let longest = LINE_BYTES_MAX >> 20;
                let what =
                    format!("line {line} of the trace {}, or one soon after, is longer than {longest} MiB", self.name);
                Error::new(ErrorKind::Format, what).remedy("give one use a line")
            }
            csv::ErrorKind::Io(cause) => failed(self.name, cause),
            other => Error::new(
                ErrorKind::Format,
                format!("line {line} of the trace {} is not understood: {other:?}", self.name),
            )
            .remedy("give one use a line"),
        })?;
        if self.spaces || self.skipped > 0 {
            let mut position = into.position().cloned().unwrap_or_else(csv::Position::new);
            position.set_line(self.skipped + position.line());
            if self.spaces {
                *into = into.iter().filter(|field| !field.trim_ascii().is_empty()).collect();
            }
            into.set_position(Some(position));
        }
        Ok(read)
    }
}

/// Fails at a line longer than [`LINE_BYTES_MAX`].
struct Bounded<R> {
    inner: R,
    /// Bytes of the line so far.
    line: usize,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(into)?;
        match into[..count].iter().rposition(|byte| *byte == b'\n') {
            Some(end) => self.line = count - end - 1,
            None => self.line += count,
        }
        if self.line > LINE_BYTES_MAX { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Trace;
    use crate::sim::trace::pages_of;

    fn read(text: &[u8], options: &TraceOptions) -> Result<Trace> {
        super::read(text, "made.csv", options, &mut |_| ())?.end()
    }

    fn column(text: &str) -> TraceOptions {
        TraceOptions { column: Some(text.parse().unwrap()), ..TraceOptions::default() }
    }

    #[test]
    fn one_id_a_line() {
        let none = TraceOptions::default();
        for text in ["7\n3\n7\n", "7\r\n3\r\n\r\n7", "# ids\n7\n3\n7", "id\n7\n3\n7", "a\nb\na\n", "7\n007\n7"] {
            let mut trace = read(text.as_bytes(), &none).unwrap();
            assert_eq!((pages_of(&mut trace), trace.writes()), (vec![0, 1, 0], 0), "{text:?}");
        }
        assert_eq!(pages_of(&mut read(b"7", &none).unwrap()), [0]);
        // Numbers beyond 64 bits are ids too.
        let mut trace = read(b"99999999999999999999999\n1\n99999999999999999999999\n", &none).unwrap();
        assert_eq!(pages_of(&mut trace), [0, 1, 0]);
    }

    #[test]
    fn columns_have_numbers_and_names() {
        let none = TraceOptions::default();
        for (text, options) in [
            ("1, 9, 100\n2, 8, 100\n3, 9, 100\n", column("2")),
            ("time,obj_id,size\n1,9,100\n2,8,100\n3,9,100\n", none.clone()),
            ("time\tKey\tsize\n1\t9\t100\n2\t8\t100\n3\t9\t100\n", none.clone()),
            ("when what\n1 9\n2 8\n3 9\n", column("what")),
            ("# a comment, with a comma\n\n  1 9\n 10  8\n100 9\n", column("2")),
        ] {
            let mut trace = read(text.as_bytes(), &options).unwrap();
            assert_eq!(pages_of(&mut trace), [0, 1, 0], "{text:?}");
        }
        for (text, options, part) in [
            ("1,9\n2,8\n", none, "several columns"),
            ("1,9\n2,8\n", column("3"), "no column 3"),
            ("a,b\n2,8\n", column("c"), "it has 2: a, b"),
            ("1,9\n2\n", column("2"), "line 2 of the trace made.csv has nothing in column 2"),
        ] {
            let error = read(text.as_bytes(), &options).unwrap_err();
            assert!(error.to_string().contains(part), "{part:?}: {error}");
        }
        for bad in ["", " ", "0", "5000000000"] {
            assert!(bad.parse::<Column>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn reads_are_told_from_writes() {
        let text = b"id,op\n1,get\n2,SET\n1,w\n2,delete\n3,read\n";
        let mut trace = read(text, &TraceOptions::default()).unwrap();
        assert_eq!((pages_of(&mut trace), trace.writes()), (vec![0, 1, 0, 2], 2));
        let read_only = TraceOptions { read_only: true, ..TraceOptions::default() };
        assert_eq!(read(text, &read_only).unwrap().writes(), 0);
        let error = read(b"id,op\n1,get\n2,think\n", &TraceOptions::default()).unwrap_err();
        assert!(error.to_string().contains("line 3") && error.to_string().contains("think"), "{error}");
        let by_number = TraceOptions { op_column: "1".parse().unwrap(), ..column("2") };
        assert_eq!(read(b"R,5\nW,5\n", &by_number).unwrap().writes(), 1);
        // Of a text whose column of that name says something else.
        let none = TraceOptions { op_column: "none".parse().unwrap(), ..TraceOptions::default() };
        let mut trace = read(b"id,type\n1,db\n2,delete\n", &none).unwrap();
        assert_eq!((pages_of(&mut trace), trace.writes()), (vec![0, 1], 0));
    }

    /// In a text of one column, the first id was taken for a name where the second one is a number.
    #[test]
    fn regression_the_first_of_ids_in_hexadecimal_is_a_use() {
        let mut trace = read(b"3fa2\n1234\n3fa2\n", &TraceOptions::default()).unwrap();
        assert_eq!(pages_of(&mut trace), [0, 1, 0]);
    }

    /// Ids are kept, so a small packed file of long ones would take any amount of memory.
    #[test]
    fn regression_ids_and_columns_have_limits() {
        let long = format!("{}\n", "x".repeat(ID_BYTES_MAX + 1));
        let wide = ",".repeat(COLUMNS_MAX);
        for (text, part) in [(long, "more than 4096"), (wide, "more than 1024")] {
            let error = read(text.as_bytes(), &TraceOptions::default()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format);
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn bad_texts_are_refused() {
        for text in [&b""[..], b"\n\n", b"# nothing\n", b"id\n"] {
            let error = read(text, &TraceOptions::default()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format, "{error}");
        }
        let endless = io::BufReader::new(io::repeat(b'5'));
        let error = super::read(endless, "made.csv", &TraceOptions::default(), &mut |_| ()).map(drop).unwrap_err();
        assert!(error.to_string().contains("longer than 16 MiB"), "{error}");
    }
}
