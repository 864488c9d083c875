//! The table of messages: what a fact file says, ready for look-ups.
//!
//! A fact file is text, a fact a line, its columns divided by tabs:
//!
//! ```text
//! @PACKAGE ⇥ GROUP/VERSION
//! MESSAGE
//! ⇥ NUMBER ⇥ JSON-NAME ⇥ SHAPE+TYPE ⇥ FLAGS
//! ```
//!
//! Packages, messages and fields are sorted (fields by number). SHAPE is `[]` for lists, `{}` for
//! maps by string, `<>` for messages whose fields are the parent's in JSON, nothing for the rest.
//! TYPE is a scalar (`string`, `bytes`, `bool`, `int32`, `int64`, `double`), a message (of another
//! package: `PACKAGE.MESSAGE`), or a message with a JSON form of its own: `time`, `microtime`,
//! `duration`, `quantity`, `intstr`, `raw` (embedded JSON), `strings` (a list), and `or-list:`,
//! `or-bool:`, `or-strings:` before the message that it is an alternative to. FLAGS: `*` a pointer
//! in Go, `?` left out of JSON when empty, `0` left out also when it is an empty struct.

use std::collections::HashMap;

/// A message of one [`Descriptors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageId(u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    String,
    Bytes,
    Bool,
    Int32,
    Int64,
    Double,
    Message(MessageId),
    Time,
    MicroTime,
    Duration,
    Quantity,
    IntOrString,
    Raw,
    Strings,
    OrList(MessageId),
    OrBool(MessageId),
    OrStrings(MessageId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Single,
    List,
    Map,
    Inline,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub number: u32,
    pub name: &'static str,
    pub kind: Kind,
    pub shape: Shape,
    /// Presence means something: absent and empty are two things.
    pub pointer: bool,
    pub omit_empty: bool,
    pub omit_zero: bool,
}

/// All messages. About 30 bytes a field: it is made when the first client speaks protobuf.
pub struct Descriptors {
    fields: Vec<Field>,
    /// The end of a message's fields; they start at the end of the message before.
    ends: Vec<u16>,
    /// By `apiVersion` and kind.
    kinds: HashMap<(&'static str, &'static str), MessageId>,
    /// The version whose messages belong to every group: options, status.
    common: &'static str,
}

impl Descriptors {
    /// `common`: the version whose kinds are part of every group.
    ///
    /// # Panics
    /// If the text is no fact file: it is part of the program, and tested.
    pub fn parse(text: &'static str, common: &'static str) -> Self {
        let ids = message_ids(text);
        let mut table = Self { fields: vec![], ends: vec![], kinds: HashMap::new(), common };
        let (mut package, mut group_version) = ("", "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix('@') {
                (package, group_version) = rest.split_once('\t').unwrap_or((rest, ""));
            } else if let Some(columns) = line.strip_prefix('\t') {
                let field = parse_field(columns, package, &ids);
                table
                    .fields
                    .push(field.unwrap_or_else(|| panic!("a field of {package}: {line:?}")));
                let end = u16::try_from(table.fields.len()).expect("fewer than 65536 fields");
                *table.ends.last_mut().expect("fields are below their message") = end;
            } else {
                if !group_version.is_empty() {
                    table.kinds.insert((group_version, line), ids[&(package, line)]);
                }
                table.ends.push(table.ends.last().copied().unwrap_or(0));
            }
        }
        table
    }

    /// The message of a kind.
    pub fn kind(&self, api_version: &str, kind: &str) -> Option<MessageId> {
        let own = self.kinds.get(&(api_version, kind));
        own.or_else(|| self.kinds.get(&(self.common, kind))).copied()
    }

    pub(super) fn fields(&self, MessageId(id): MessageId) -> &[Field] {
        let id = usize::from(id);
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.fields[usize::from(start)..usize::from(self.ends[id])]
    }
}

/// Messages by package and name, numbered in the order of the text.
fn message_ids(text: &'static str) -> HashMap<(&'static str, &'static str), MessageId> {
    let mut ids = HashMap::new();
    let mut package = "";
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix('@') {
            package = rest.split('\t').next().unwrap_or_default();
        } else if !line.starts_with('\t') {
            let id = u16::try_from(ids.len()).expect("fewer than 65536 messages");
            ids.insert((package, line), MessageId(id));
        }
    }
    ids
}

fn parse_field(
    columns: &'static str,
    package: &'static str,
    ids: &HashMap<(&'static str, &'static str), MessageId>,
) -> Option<Field> {
    let mut columns = columns.split('\t');
    let number = columns.next()?.parse().ok()?;
    let name = columns.next()?;
    let column = columns.next()?;
    let flags = columns.next().unwrap_or_default();
    let shapes = [("[]", Shape::List), ("{}", Shape::Map), ("<>", Shape::Inline)];
    let shaped = shapes.iter().find_map(|(mark, shape)| Some((column.strip_prefix(mark)?, *shape)));
    let (column, shape) = shaped.unwrap_or((column, Shape::Single));
    let message = |name: &'static str| match name.rsplit_once('.') {
        Some(key) => ids.get(&key).copied(),
        None => ids.get(&(package, name)).copied(),
    };
    let kind = match column {
        "string" => Kind::String,
        "bytes" => Kind::Bytes,
        "bool" => Kind::Bool,
        "int32" => Kind::Int32,
        "int64" => Kind::Int64,
        "double" => Kind::Double,
        "time" => Kind::Time,
        "microtime" => Kind::MicroTime,
        "duration" => Kind::Duration,
        "quantity" => Kind::Quantity,
        "intstr" => Kind::IntOrString,
        "raw" => Kind::Raw,
        "strings" => Kind::Strings,
        other => match other.split_once(':') {
            Some(("or-list", name)) => Kind::OrList(message(name)?),
            Some(("or-bool", name)) => Kind::OrBool(message(name)?),
            Some(("or-strings", name)) => Kind::OrStrings(message(name)?),
            Some(_) => return None,
            None => Kind::Message(message(other)?),
        },
    };
    Some(Field {
        number,
        name,
        kind,
        shape,
        pointer: flags.contains('*'),
        omit_empty: flags.contains('?'),
        omit_zero: flags.contains('0'),
    })
}
