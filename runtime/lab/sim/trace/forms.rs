//! The forms of traces, and what tells how to read one.

use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// The form of a trace's file. Each may be packed by gzip or zstd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceForm {
    /// A [capture](crate::sim::capture) of a run.
    Capture,
    /// Requests in the form of the Mooncake project: one JSON object a line, whose `hash_ids` lists the blocks that the
    /// request uses in order. It makes the blocks that no request used before, unless it has an `"op"`, `"read"` or
    /// `"write"`.
    Mooncake,
    /// Text with one use a line: an id, or columns separated by commas, tabs, semicolons or spaces, of which one is the
    /// id. Ids are any text. Lines that begin with `#` are skipped. libCacheSim's `csv` is such a text.
    Text,
    /// libCacheSim's `oracleGeneral`: 24 bytes a use.
    OracleGeneral,
    /// The traces of the paper on ARC: a line has the first block of a request, how many consecutive blocks it
    /// accesses, a number that is ignored, and the request's number.
    Lis,
}

impl TraceForm {
    /// All forms.
    pub const ALL: [Self; 5] = [Self::Capture, Self::Mooncake, Self::Text, Self::OracleGeneral, Self::Lis];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Capture => "capture",
            Self::Mooncake => "mooncake",
            Self::Text => "text",
            Self::OracleGeneral => "oracle-general",
            Self::Lis => "lis",
        }
    }
}

impl fmt::Display for TraceForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TraceForm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|form| form.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new(ErrorKind::InvalidArgument, format!("{text:?} is no form of a trace"))
                .remedy(format!("choose one of {names}"))
        })
    }
}

/// A column of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    /// Its number, from 1.
    Number(NonZeroU32),
    /// Its name in the text's first line.
    Name(String),
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

impl FromStr for Column {
    type Err = Error;

    /// Digits are a number, anything else a name.
    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why| Error::new(ErrorKind::InvalidArgument, format!("column {text:?} {why}"));
        let remedy = "give its number, from 1, or its name in the first line";
        if text.trim().is_empty() {
            return Err(wrong("has no name").remedy(remedy));
        }
        if !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(Self::Name(text.trim().to_owned()));
        }
        text.parse().map(Self::Number).map_err(|_| wrong("is not a number from 1 to 4294967295").remedy(remedy))
    }
}

/// The column of a text that tells reads from writes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OpColumn {
    /// One that is called `op`, `operation`, `rw` or `type`, if there is one.
    #[default]
    Usual,
    /// This one.
    Column(Column),
    /// None, whatever columns are called: all uses read, those too that delete.
    None,
}

impl FromStr for OpColumn {
    type Err = Error;

    /// `none`, or a [`Column`].
    fn from_str(text: &str) -> Result<Self> {
        if text == "none" { Ok(Self::None) } else { text.parse().map(Self::Column) }
    }
}

/// How to read a trace's file.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TraceOptions {
    /// Its form; `None` finds it out.
    pub form: Option<TraceForm>,
    /// The column of ids, in a text of several.
    pub column: Option<Column>,
    /// The column of a text that tells reads from writes.
    pub op_column: OpColumn,
    /// No use writes its page, whatever the file says.
    pub read_only: bool,
}

impl TraceOptions {
    /// Sets [`form`](Self::form).
    #[must_use]
    pub fn form(mut self, form: TraceForm) -> Self {
        self.form = Some(form);
        self
    }

    /// Sets [`column`](Self::column).
    #[must_use]
    pub fn column(mut self, column: Column) -> Self {
        self.column = Some(column);
        self
    }

    /// Sets [`op_column`](Self::op_column).
    #[must_use]
    pub fn op_column(mut self, column: OpColumn) -> Self {
        self.op_column = column;
        self
    }

    /// Sets [`read_only`](Self::read_only).
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }
}

/// The error of reading a trace's bytes.
pub(super) fn failed(name: &str, cause: io::Error) -> Error {
    let what = format!("read the trace {name}");
    match cause.kind() {
        // What the decompressors say of their input.
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => {
            Error::new(ErrorKind::Format, format!("the trace {name} is packed wrongly, or incomplete: {cause}"))
                .remedy("fetch the file again")
        }
        _ => Error::io(what, cause).remedy("check the file and its disk"),
    }
}
