//! Bounds on what a chat template takes. A template comes with a model, from whoever published it, and Jinja has no
//! limit of memory: a text that is set to itself twice, 40 times, is a terabyte. It has a limit of steps, but a step
//! may compare megabytes.
//!
//! The template is compiled to instructions, and these are rewritten: before each one that makes a text or a list, a
//! filter of this module charges what it makes to the [`Budget`] of the rendering. What the template writes, also into
//! a variable or for a macro's caller, is charged by the formatter. So all that one rendering makes stays below the
//! budget, whatever it keeps. What comparisons, tests, filters and methods read is charged alike. What has no bound of
//! its own is refused: filters that are not known here, calls with `*`, other templates.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, Vm, WhitespaceConfig, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Rest, ValueKind, merge_maps};
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind, Output, State, Value, escape_formatter};
use parking_lot::Mutex;
use serde_json::Value as Json;

/// The longest source, in bytes, and the most tokens in one pair of braces: they are parsed and compiled
/// by recursion, and so is each `elif`.
const SOURCE_MOST: usize = 256 << 10;
const TAG_MOST: usize = 1000;
const ALTERNATIVES_MOST: usize = 500;
/// The most bytes of texts and lists that are made of constants. They are made when a template is compiled.
const CONSTANTS_MOST: f64 = (1 << 20) as f64;
/// Bytes of texts and lists that a rendering may make: so many, and so many for each byte that it is given.
const MADE_MOST: usize = 64 << 20;
const MADE_EACH: usize = 8;
/// Bytes of texts that a rendering may read by comparisons, tests, filters and methods: so many, which take about a
/// second, and so many for each byte that it is given.
const READ_MOST: usize = 1 << 30;
const READ_EACH: usize = 256;
/// What a value costs at least that is read as a part of another one.
const READ_LEAST: usize = 16;
/// The most values that are looked at when they are kept in variables, and how deep one may be. JSON has 128 levels.
const LOOKS_MOST: usize = 1 << 22;
const DEPTH_MOST: usize = 160;
/// What a value in a list takes, in bytes.
const VALUE_BYTES: usize = size_of::<Value>();
/// The widest field of a format.
const WIDTH_DIGITS: usize = 4;
const WIDTH_MOST: usize = 10_usize.pow(WIDTH_DIGITS as u32);
/// What fills a field takes at most, in bytes: a character of four, in the field and in what it is put together from.
const FILL_BYTES: usize = 8;
/// How much longer a text gets at most where its case changes, or where it is escaped.
const CASE_TIMES: usize = 3;
const ESCAPE_TIMES: usize = 8;

const NAME: &str = "chat";
/// No variable of a template has a name like this, nor has a filter.
const BUDGET: &str = "(budget)";
const CONCAT: &str = "(concat)";
const ADD: &str = "(add)";
const TIMES: &str = "(times)";
const CONTAINS: &str = "(contains)";
const COMPARE: &str = "(compare)";
const TEST: &str = "(test)";
const MADE: &str = "(made)";
const KEEP: &str = "(keep)";
const SHARE: &str = "(share)";
const FILTER: &str = "(filter)";
const METHOD: &str = "(method)";

type Result<T, E = JinjaError> = std::result::Result<T, E>;

fn invalid(why: impl Into<String>) -> JinjaError {
    JinjaError::new(ErrorKind::InvalidOperation, why.into())
}

/// What is left for a rendering.
#[derive(Debug)]
pub struct Budget {
    most: usize,
    bytes: AtomicUsize,
    reads: AtomicUsize,
    looks: AtomicUsize,
}

impl Object for Budget {}

impl Budget {
    /// That of a rendering which is given so many bytes of text.
    fn of_input(given: usize) -> Self {
        let most = given.saturating_mul(MADE_EACH).saturating_add(MADE_MOST);
        let reads = given.saturating_mul(READ_EACH).saturating_add(READ_MOST);
        Self { most, bytes: most.into(), reads: reads.into(), looks: LOOKS_MOST.into() }
    }

    fn of(state: &State<'_, '_>) -> Result<Arc<Self>> {
        let budget = state.lookup(BUDGET).and_then(|value| value.downcast_object());
        budget.ok_or_else(|| invalid("a template is rendered without a budget"))
    }

    fn take(left: &AtomicUsize, some: usize) -> bool {
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(some)).is_ok()
    }

    /// # Errors
    /// If the rendering then made more bytes than it may.
    fn charge(&self, bytes: usize) -> Result<()> {
        let too_much = || {
            let why = "shorten the conversation, or use a model whose template makes less of it";
            invalid(format!("it makes more than {} bytes of texts and lists: {why}", self.most))
        };
        Self::take(&self.bytes, bytes).then_some(()).ok_or_else(too_much)
    }

    /// # Errors
    /// If the rendering then read more bytes than it may.
    fn read(&self, bytes: usize) -> Result<()> {
        let too_much = || {
            let why = "shorten the conversation, or use a model whose template compares less";
            invalid(format!("it reads more bytes of texts than it may: {why}"))
        };
        Self::take(&self.reads, bytes).then_some(()).ok_or_else(too_much)
    }

    /// Charges that all of a value is read, so many times.
    fn read_all(&self, value: &Value, times: usize) -> Result<()> {
        let bytes = self.read_once(value, DEPTH_MOST)?;
        self.read(bytes.saturating_mul(times.saturating_sub(1)))
    }

    /// Charges that all of a value is read, and returns its bytes.
    fn read_once(&self, value: &Value, depth: usize) -> Result<usize> {
        let own = value.as_str().map_or(READ_LEAST, |text| text.len().max(READ_LEAST));
        self.read(own)?;
        let Some(object) = value.as_object() else { return Ok(own) };
        if depth == 0 {
            return Err(invalid(format!("a value that is compared has more than {DEPTH_MOST} levels")));
        }
        let add = |sum, part: Value| Ok(self.read_once(&part, depth - 1)?.saturating_add(sum));
        match value.kind() {
            ValueKind::Map => {
                let mut pairs = object.try_iter_pairs().into_iter().flatten().flat_map(|(key, part)| [key, part]);
                pairs.try_fold(own, add)
            }
            ValueKind::Seq => object.try_iter().into_iter().flatten().try_fold(own, add),
            _ => Ok(own),
        }
    }

    /// Charges that these values, as far as they are texts, are read.
    fn read_texts(&self, values: &[Value]) -> Result<()> {
        self.read(values.iter().filter_map(Value::as_str).map(str::len).fold(0, usize::saturating_add))
    }

    /// Charges a comparison.
    fn compare(&self, left: &Value, right: &Value) -> Result<()> {
        match (left.as_str(), right.as_str()) {
            (Some(left), Some(right)) => self.read(left.len().min(right.len())),
            _ if left.as_object().is_some() && left.kind() == right.kind() => self.read_all(left, 1),
            _ => Ok(()),
        }
    }

    fn left(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of a value as a text; no more than a little beyond what is left.
    fn text(&self, value: &Value) -> usize {
        struct Count(usize, usize);
        impl Write for Count {
            fn write_str(&mut self, text: &str) -> fmt::Result {
                self.0 = self.0.saturating_add(text.len());
                if self.0 > self.1 { Err(fmt::Error) } else { Ok(()) }
            }
        }
        if let Some(text) = value.as_str() {
            return text.len();
        }
        let mut count = Count(0, self.left());
        // What does not fit is an error, and the count is then beyond what is left.
        let _ = write!(count, "{value}");
        count.0
    }

    /// Bytes of a list of what a value consists of; no more than a little beyond what is left.
    fn list(&self, value: &Value) -> usize {
        let most = self.left() / VALUE_BYTES + 1;
        let unsized_list = || value.try_iter().map_or(0, |all| all.take(most).count());
        value.len().unwrap_or_else(unsized_list).saturating_mul(VALUE_BYTES)
    }

    /// Looks at a value which a variable keeps. One that is `shared` is kept by a namespace.
    ///
    /// Values are dropped, compared and written by recursion, so none may be deep, or have one part many times; and
    /// a namespace that is part of itself would never be dropped.
    fn look(&self, value: &Value, depth: usize, shared: bool) -> Result<()> {
        let Some(object) = value.as_object() else { return Ok(()) };
        if depth == 0 {
            return Err(invalid(format!("a variable has more than {DEPTH_MOST} levels")));
        }
        let is_namespace = object.type_name().ends_with("::Namespace");
        let kind = value.kind();
        if shared && (is_namespace || !matches!(kind, ValueKind::Seq | ValueKind::Map)) {
            return Err(invalid("a namespace keeps texts, numbers, lists and mappings only"));
        }
        let look = |part: Value| {
            let too_much = || invalid(format!("its variables have more than {LOOKS_MOST} values"));
            Self::take(&self.looks, 1).then_some(()).ok_or_else(too_much)?;
            self.look(&part, depth - 1, shared)
        };
        match kind {
            ValueKind::Map => object.try_iter_pairs().into_iter().flatten().try_for_each(|(_, part)| look(part)),
            ValueKind::Seq | ValueKind::Iterable => object.try_iter().into_iter().flatten().try_for_each(look),
            _ => Ok(()),
        }
    }
}

/// Both sides of an operator, as they come off the stack.
fn sides(left: Value, right: Value) -> Value {
    Value::from(vec![right, left])
}

fn concat(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value> {
    let budget = Budget::of(state)?;
    budget.charge(budget.text(&left).saturating_add(budget.text(&right)))?;
    Ok(sides(left, right))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value> {
    let is_text = |value: &Value| value.kind() == ValueKind::String;
    if is_text(&left) && is_text(&right) {
        return concat(state, left, right);
    }
    if is_list(&left) && is_list(&right) {
        let budget = Budget::of(state)?;
        budget.charge(budget.list(&left).saturating_add(budget.list(&right)))?;
    }
    Ok(sides(left, right))
}

fn times(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value> {
    for (one, count) in [(&left, &right), (&right, &left)] {
        let budget = Budget::of(state)?;
        let bytes = match one.as_str() {
            Some(text) => text.len(),
            // Also of nothing many times: whoever goes over that counts.
            None if is_list(one) => budget.list(one).max(1),
            None => continue,
        };
        budget.charge(bytes.saturating_mul(count.as_usize().unwrap_or(1)))?;
    }
    Ok(sides(left, right))
}

/// The operator `in`, before it is applied: what is looked for in a text becomes one.
fn contains(state: &State<'_, '_>, part: Value, all: Value) -> Result<Value> {
    let budget = Budget::of(state)?;
    if all.as_str().is_some() {
        budget.charge(if part.as_str().is_some() { 0 } else { budget.text(&part) })?;
    }
    if all.kind() != ValueKind::Map {
        budget.read_all(&all, 1)?;
    }
    Ok(sides(part, all))
}

/// A comparison, before it is made.
fn compare(state: &State<'_, '_>, left: Value, right: Value) -> Result<Value> {
    Budget::of(state)?.compare(&left, &right)?;
    Ok(sides(left, right))
}

/// A test of values, before it is made, whose name comes last. Others than comparisons look at no more than texts.
fn test(state: &State<'_, '_>, values: Rest<Value>) -> Result<Value> {
    let [values @ .., name] = values.as_slice() else { return Err(invalid("a test has no name")) };
    let budget = Budget::of(state)?;
    match (name.as_str().unwrap_or_default(), values) {
        (
            "==" | "eq" | "equalto" | "!=" | "ne" | "<" | "lt" | "lessthan" | "<=" | "le" | ">" | "gt" | "greaterthan"
            | ">=" | "ge",
            [left, right],
        ) => budget.compare(left, right)?,
        (_, values) => budget.read_texts(values)?,
    }
    Ok(values.iter().rev().cloned().collect())
}

/// The test `in`.
fn is_in(state: &State<'_, '_>, part: Value, all: Value) -> Result<bool> {
    contains(state, part.clone(), all.clone())?;
    minijinja::tests::is_in(state, &part, &all)
}

/// Something that is made already, by what makes no more than was there or than a few values.
fn made(state: &State<'_, '_>, value: Value) -> Result<Value> {
    let budget = Budget::of(state)?;
    budget.charge(match value.kind() {
        ValueKind::String => budget.text(&value),
        ValueKind::Seq | ValueKind::Map => budget.list(&value),
        _ => 0,
    })?;
    Ok(value)
}

/// What a variable keeps.
fn keep(state: &State<'_, '_>, value: Value) -> Result<Value> {
    if value.as_object().is_some() {
        Budget::of(state)?.look(&value, DEPTH_MOST, false)?;
    }
    Ok(value)
}

/// What a namespace keeps: a list that is yet to be made may hold the namespace, and is made here.
fn share(state: &State<'_, '_>, value: Value) -> Result<Value> {
    if value.as_object().is_none() {
        return Ok(value);
    }
    let budget = Budget::of(state)?;
    let value = match value.kind() {
        ValueKind::Iterable => {
            budget.charge(budget.list(&value))?;
            Value::from(value.try_iter()?.collect::<Vec<_>>())
        }
        _ => value,
    };
    budget.look(&value, DEPTH_MOST, true)?;
    Ok(value)
}

/// Charges a text in which `old` is replaced.
fn replaced(budget: &Budget, text: &Value, old: Option<&Value>, new: Option<&Value>) -> Result<()> {
    let bytes = |value: Option<&Value>| value.map_or(0, |value| budget.text(value));
    // Each may become a text of its own before.
    budget.charge(budget.text(text).saturating_add(bytes(old)).saturating_add(bytes(new)))?;
    let (text, old) = (text.to_string(), old.map(ToString::to_string).unwrap_or_default());
    budget.charge(text.matches(old.as_str()).count().saturating_mul(bytes(new)))
}

/// Charges the parts of a text.
fn split(budget: &Budget, text: &str, by: Option<&Value>) -> Result<()> {
    let parts = match by.and_then(Value::as_str) {
        Some(by) => text.matches(by).count(),
        None => text.split_whitespace().count().max(text.lines().count()),
    };
    budget.charge(text.len().saturating_add((parts + 1).saturating_mul(VALUE_BYTES)))
}

/// Charges a text that is formatted: each field may be as long as all arguments are.
fn formatted(budget: &Budget, format: &str, arguments: &[Value]) -> Result<()> {
    if format.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > WIDTH_DIGITS) {
        return Err(invalid(format!("a format takes widths of at most {WIDTH_DIGITS} digits")));
    }
    let fields = format.bytes().filter(|byte| b"%{".contains(byte)).count();
    let field = arguments.iter().fold(WIDTH_MOST * FILL_BYTES, |sum, value| sum.saturating_add(budget.text(value)));
    budget.charge(fields.saturating_mul(field).saturating_add(format.len()))
}

/// Charges texts that are put together.
fn joined(budget: &Budget, list: &Value, between: usize) -> Result<()> {
    for part in list.try_iter().into_iter().flatten() {
        budget.charge(budget.text(&part).saturating_add(between))?;
    }
    Ok(())
}

/// An argument by its place or its name.
fn argument(arguments: &[Value], place: usize, name: &str) -> Option<Value> {
    let named = arguments.last().filter(|last| last.kind() == ValueKind::Map);
    let named = named.and_then(|all| all.get_attr(name).ok()).filter(|value| !value.is_undefined());
    named.or_else(|| arguments.get(place).cloned())
}

/// Applies a filter to values, the last of which is its name.
fn filter(state: &State<'_, '_>, values: Rest<Value>) -> Result<Value> {
    let [value, arguments @ .., name] = values.as_slice() else {
        return Err(invalid("a filter has no name"));
    };
    let name = name.as_str().unwrap_or_default();
    filtered(state, name, value, arguments, &values[..values.len() - 1])
}

fn filtered(state: &State<'_, '_>, name: &str, value: &Value, arguments: &[Value], all: &[Value]) -> Result<Value> {
    let budget = Budget::of(state)?;
    budget.read_texts(all)?;
    let parts = value.len().unwrap_or(1).max(1);
    match name {
        // As often as sorting looks at each part.
        "dictsort" | "max" | "min" | "sort" | "unique" => budget.read_all(value, parts.ilog2() as usize + 1)?,
        // No test reads more of a part than there is of what the part is tested by.
        "reject" | "rejectattr" | "select" | "selectattr" => {
            arguments.iter().try_for_each(|argument| budget.read_all(argument, parts))?;
        }
        _ => {}
    }
    match name {
        // They make none, or a part of what is there. `tojson` is this crate's, and charges what it writes.
        "abs" | "attr" | "bool" | "count" | "d" | "default" | "first" | "float" | "int" | "last" | "length" | "max"
        | "min" | "round" | "tojson" => {}
        "capitalize" | "lower" | "safe" | "string" | "title" | "trim" | "upper" => {
            budget.charge(budget.text(value).saturating_mul(CASE_TIMES))?;
        }
        "e" | "escape" => budget.charge(budget.text(value).saturating_mul(ESCAPE_TIMES))?,
        "dictsort" | "items" | "list" | "reject" | "rejectattr" | "reverse" | "select" | "selectattr" | "sort"
        | "unique" => budget.charge(budget.list(value))?,
        "map" if argument(arguments, usize::MAX, "attribute").is_none() => {
            let [name, others @ ..] = arguments else { return Err(invalid("the filter 'map' has no filter")) };
            let name = name.as_str().ok_or_else(|| invalid("the name of a filter is no text"))?;
            budget.charge(budget.list(value))?;
            let one = |part: Value| {
                let all: Vec<Value> = std::iter::once(part.clone()).chain(others.iter().cloned()).collect();
                filtered(state, name, &part, others, &all)
            };
            return Ok(Value::from(value.try_iter()?.map(one).collect::<Result<Vec<_>>>()?));
        }
        "map" => budget.charge(budget.list(value))?,
        "join" => joined(&budget, value, argument(arguments, 0, "d").map_or(0, |by| budget.text(&by)))?,
        "replace" => replaced(&budget, value, arguments.first(), arguments.get(1))?,
        "format" => {
            budget.charge(budget.text(value))?;
            formatted(&budget, &value.to_string(), arguments)?;
        }
        "split" | "lines" => {
            budget.charge(budget.text(value))?;
            split(&budget, &value.to_string(), arguments.first())?;
        }
        "indent" => {
            let text = budget.text(value);
            budget.charge(text)?;
            let lines = value.to_string().lines().count() + 1;
            let width = argument(arguments, 0, "width").and_then(|width| width.as_usize());
            budget.charge(lines.saturating_mul(width.unwrap_or(4)))?;
        }
        _ => {
            let why = format!("'{name}' is none of the filters that a chat template may use");
            return Err(JinjaError::new(ErrorKind::UnknownFilter, why));
        }
    }
    state.apply_filter(name, all)
}

/// Calls a method of a value, with arguments, the last of which is its name.
fn method(state: &State<'_, '_>, values: Rest<Value>) -> Result<Value> {
    let [value, arguments @ .., name] = values.as_slice() else {
        return Err(invalid("a method has no name"));
    };
    let name = name.as_str().unwrap_or_default();
    let budget = Budget::of(state)?;
    budget.read_texts(&values)?;
    if let Some(text) = value.as_str() {
        match name {
            "format" => formatted(&budget, text, arguments)?,
            "join" => arguments.iter().try_for_each(|list| joined(&budget, list, text.len()))?,
            "replace" => replaced(&budget, value, arguments.first(), arguments.get(1))?,
            "split" | "splitlines" => split(&budget, text, arguments.first())?,
            "capitalize" | "lower" | "lstrip" | "rstrip" | "strip" | "title" | "upper" => {
                budget.charge(text.len().saturating_mul(CASE_TIMES))?;
            }
            _ => {}
        }
    }
    value.call_method(state, name, arguments)
}

/// Bytes of texts and lists that are made of a constant expression, at most, and whether it has any; none if it is no
/// such expression.
fn constant(node: &Json) -> Option<(f64, bool)> {
    let sum = |parts: &Json| {
        let parts = parts.as_array()?.iter().map(constant);
        parts.into_iter().try_fold((0.0, true), |(sum, _), part| Some((sum + part?.0 + VALUE_BYTES as f64, true)))
    };
    let parts = &node["inner"][0];
    match node["expr"].as_str()? {
        "Const" => Some(match &parts["value"] {
            Json::String(text) => (text.len().max(1) as f64, true),
            number => (number.as_f64().unwrap_or(1.0).abs().max(1.0), false),
        }),
        "List" => sum(&parts["items"]).map(|(bytes, _)| (bytes.max(1.0), true)),
        "Map" => Some((sum(&parts["keys"])?.0 + sum(&parts["values"])?.0, true)),
        "UnaryOp" => constant(&parts["expr"]),
        "BinOp" => {
            let ((left, texts), (right, more)) = (constant(&parts["left"])?, constant(&parts["right"])?);
            let bytes = match parts["op"].as_str()? {
                "Mul" => left * right,
                "Pow" => left.powf(right),
                "Div" | "FloorDiv" => f64::INFINITY,
                _ => left + right,
            };
            Some((bytes, texts || more))
        }
        _ => None,
    }
}

/// Bytes of all such in a tree.
fn constants(node: &Json) -> f64 {
    match (constant(node), node) {
        (Some((bytes, true)), _) => bytes,
        (Some(_), _) => 0.0,
        (None, Json::Array(all)) => all.iter().map(constants).sum(),
        (None, Json::Object(members)) => members.values().map(constants).sum(),
        _ => 0.0,
    }
}

const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };

/// Refuses what would take too much to compile.
fn check(source: &str) -> Result<()> {
    let syntax = |why: String| JinjaError::new(ErrorKind::SyntaxError, why);
    if source.len() > SOURCE_MOST {
        return Err(syntax(format!("it has {} bytes, and may have {SOURCE_MOST}", source.len())));
    }
    let (mut tokens, mut alternatives) = (0, 0);
    for token in tokenize(source, false, SyntaxConfig, WHITESPACE) {
        match token?.0 {
            Token::TemplateData(_) | Token::VariableEnd | Token::BlockEnd => tokens = 0,
            token => {
                tokens += 1;
                alternatives += usize::from(matches!(token, Token::Ident("elif")));
            }
        }
        if tokens > TAG_MOST {
            return Err(syntax(format!("one pair of braces has more than {TAG_MOST} words and signs")));
        }
    }
    if alternatives > ALTERNATIVES_MOST {
        return Err(syntax(format!("it has more than {ALTERNATIVES_MOST} times 'elif'")));
    }
    let tree = parse(source, NAME, SyntaxConfig, WHITESPACE)?;
    let tree = serde_json::to_value(&tree).map_err(|error| syntax(error.to_string()))?;
    if constants(&tree) > CONSTANTS_MOST {
        return Err(syntax(format!("its constants are more than {CONSTANTS_MOST} bytes of texts and lists")));
    }
    Ok(())
}

/// Instructions with the charges between them.
fn charged<'s>(from: &Instructions<'s>) -> Result<Instructions<'s>> {
    // Where each of them begins afterwards.
    let mut places = Vec::with_capacity(from.len() + 1);
    let mut to = Instructions::new(from.name(), from.source());
    for nth in 0..from.len() as u32 {
        places.push(to.len() as u32);
        let Some(instruction) = from.get(nth) else { continue };
        let line = from.get_line(nth).unwrap_or_default() as u16;
        let mut push = |instruction| to.add_with_line(instruction, line);
        let apply = |name, arguments| Instruction::ApplyFilter(name, Some(arguments), !0);
        let operator = match instruction {
            Instruction::StringConcat => Some(CONCAT),
            Instruction::Add => Some(ADD),
            Instruction::Mul => Some(TIMES),
            Instruction::In => Some(CONTAINS),
            Instruction::Eq
            | Instruction::Ne
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::CompareAndPreserve(_) => Some(COMPARE),
            _ => None,
        };
        let refused = match instruction {
            Instruction::UnpackLists(_) | Instruction::MergeKwargs(_) => Some("a call with '*' or '**'"),
            Instruction::LoadBlocks | Instruction::Include(_) | Instruction::ExportLocals => Some("another template"),
            Instruction::CompareAndPreserve(op) if format!("{op:?}").ends_with("In") => Some("'in' within a chain"),
            _ => None,
        };
        if let Some(what) = refused {
            let why = format!("line {line} has {what}, which a chat template may not use");
            return Err(JinjaError::new(ErrorKind::SyntaxError, why));
        }
        if let Some(operator) = operator {
            push(apply(operator, 2));
            push(Instruction::UnpackList(2));
        }
        match instruction {
            Instruction::EmitRaw(text) => {
                push(Instruction::LoadConst(Value::from_safe_string((*text).to_owned())));
                push(Instruction::Emit);
            }
            Instruction::StoreLocal(_) => {
                push(apply(KEEP, 1));
                push(instruction.clone());
            }
            Instruction::SetAttr(_) => {
                push(Instruction::Swap);
                push(apply(SHARE, 1));
                push(Instruction::Swap);
                push(instruction.clone());
            }
            Instruction::ApplyFilter(name, Some(arguments), _) => {
                push(Instruction::LoadConst(Value::from(*name)));
                push(apply(FILTER, arguments + 1));
            }
            Instruction::PerformTest(name, Some(arguments), _) => {
                push(Instruction::LoadConst(Value::from(*name)));
                push(apply(TEST, arguments + 1));
                push(Instruction::UnpackList((*arguments).into()));
                push(instruction.clone());
            }
            Instruction::CallMethod(name, Some(arguments)) => {
                push(Instruction::LoadConst(Value::from(*name)));
                push(apply(METHOD, arguments + 1));
            }
            Instruction::CallFunction(..) | Instruction::CallObject(_) | Instruction::Slice => {
                push(instruction.clone());
                push(apply(MADE, 1));
            }
            _ => {
                push(instruction.clone());
            }
        }
    }
    places.push(to.len() as u32);
    for nth in 0..to.len() as u32 {
        if let Some(
            Instruction::Iterate(target)
            | Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::BuildMacro(_, target, _),
        ) = to.get_mut(nth)
        {
            *target = places.get(*target as usize).copied().unwrap_or(u32::MAX);
        }
    }
    Ok(to)
}

type Compiled<'s> = (Instructions<'s>, BTreeMap<&'s str, Instructions<'s>>);

fn compiled(source: &str) -> Result<Compiled<'_>> {
    let tree = parse(source, NAME, SyntaxConfig, WHITESPACE)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    let blocks = blocks.iter().map(|(name, block)| Ok((*name, charged(block)?)));
    Ok((charged(&instructions)?, blocks.collect::<Result<_>>()?))
}

/// What is written, charged to a rendering.
#[derive(Debug)]
pub struct Charged {
    budget: Arc<Budget>,
    bytes: Vec<u8>,
}

impl Charged {
    /// Nothing yet, of the rendering that `state` is of.
    pub fn of(state: &State<'_, '_>) -> Result<Self> {
        Ok(Self { budget: Budget::of(state)?, bytes: Vec::new() })
    }

    /// Charges what is made of it, in bytes for each of its own.
    pub fn charge_each(&self, bytes: usize) -> Result<()> {
        self.budget.charge(self.bytes.len().saturating_mul(bytes))
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl io::Write for Charged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.budget.charge(bytes.len()).map_err(io::Error::other)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a value to what is rendered.
fn format(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<()> {
    let budget = Budget::of(state)?;
    let times = if matches!(state.auto_escape(), AutoEscape::None) || value.is_safe() { 1 } else { ESCAPE_TIMES };
    budget.charge(budget.text(value).saturating_mul(times))?;
    escape_formatter(out, state, value)
}

/// A template whose renderings are bounded.
#[derive(Debug)]
pub struct Bounded {
    environment: Environment<'static>,
    source: String,
    /// One is rendered at a time, so that all together take no more than one may.
    turn: Mutex<()>,
}

impl Bounded {
    /// A template with the filters, functions and methods of `environment`.
    ///
    /// # Errors
    /// What is no template, and what has no bound.
    pub fn new(mut environment: Environment<'static>, source: String) -> Result<Self> {
        environment.set_formatter(format);
        environment.add_filter(CONCAT, concat);
        environment.add_filter(ADD, add);
        environment.add_filter(TIMES, times);
        environment.add_filter(CONTAINS, contains);
        environment.add_filter(COMPARE, compare);
        environment.add_filter(TEST, test);
        environment.add_filter(MADE, made);
        environment.add_filter(KEEP, keep);
        environment.add_filter(SHARE, share);
        environment.add_filter(FILTER, filter);
        environment.add_filter(METHOD, method);
        environment.add_test("in", is_in);
        // It writes all variables.
        environment.remove_global("debug");
        check(&source)?;
        compiled(&source)?;
        Ok(Self { environment, source, turn: Mutex::new(()) })
    }

    /// Renders it with the variables `root`, whose texts have `given` bytes.
    ///
    /// # Errors
    /// What the template refuses, and what exceeds the bounds.
    pub fn render(&self, root: Value, given: usize) -> Result<String> {
        let _turn = self.turn.lock();
        let (instructions, blocks) = compiled(&self.source)?;
        let root = merge_maps([root, Value::from_iter([(BUDGET, Value::from_object(Budget::of_input(given)))])]);
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        Vm::new(&self.environment).eval(&instructions, root, &blocks, &mut out, AutoEscape::None)?;
        drop(out);
        Ok(text)
    }
}
