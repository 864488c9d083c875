//! Checks the types of expressions before evaluation: unknown names, undefined fields, operators with
//! unsuitable operands.
//!
//! In: a parsed expression, the variables' types. Out: the type of the expression, or all errors, each
//! with its position in the form of upstream's compiler. The type `dyn` fits everywhere.

use std::collections::HashMap;
use std::sync::Arc;

use cel_parser::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedEntryExpr, IdedExpr, LiteralValue,
    SelectExpr, SourceInfo, operators,
};

use crate::CompileError;
use crate::functions;
use crate::types::{ListKind, Object, Type};

pub fn check(
    root: &IdedExpr,
    variables: &[(&str, Type)],
    source: &SourceInfo,
    text: &str,
) -> Result<Type, CompileError> {
    let mut checker = Checker::new(variables);
    let kind = checker.kind(root);
    if checker.errors.is_empty() {
        return Ok(kind);
    }
    let mut errors: Vec<(usize, usize, String)> = checker
        .errors
        .into_iter()
        .map(|(id, message)| {
            let offset = source.offset_for(id).map_or(0, |(start, _)| start as usize);
            let (line, column) = place(text, offset);
            (line, column, message)
        })
        .collect();
    errors.sort_unstable();
    errors.dedup();
    let shown: Vec<String> = errors
        .iter()
        .map(|(line, column, message)| located(text, *line, *column, message))
        .collect();
    Err(CompileError(shown.join("\n")))
}

/// The types of all parts of a checked expression.
pub fn kinds(root: &IdedExpr, variables: &[(&str, Type)]) -> HashMap<u64, Type> {
    let mut checker = Checker::new(variables);
    checker.kinds = Some(HashMap::new());
    checker.kind(root);
    checker.kinds.unwrap_or_default()
}

/// Line from one, column from zero.
fn place(text: &str, offset: usize) -> (usize, usize) {
    let before: String = text.chars().take(offset).collect();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count());
    (line, column)
}

/// An error message with its source line, and a mark below the position.
pub fn located(text: &str, line: usize, column: usize, message: &str) -> String {
    let source = text.lines().nth(line - 1).unwrap_or_default();
    let mark = format!("{}^", ".".repeat(column));
    format!("ERROR: <input>:{line}:{}: {message}\n | {source}\n | {mark}", column + 1)
}

struct Checker<'a> {
    variables: &'a [(&'a str, Type)],
    bound: Vec<(String, Type)>,
    errors: Vec<(u64, String)>,
    /// By node id, if the caller wants them.
    kinds: Option<HashMap<u64, Type>>,
}

impl<'a> Checker<'a> {
    fn new(variables: &'a [(&'a str, Type)]) -> Self {
        Self { variables, bound: vec![], errors: vec![], kinds: None }
    }

    fn wrong(&mut self, id: u64, message: String) -> Type {
        self.errors.push((id, message));
        Type::Dyn
    }

    fn undeclared(&mut self, id: u64, name: &str) -> Type {
        self.wrong(id, format!("undeclared reference to '{name}' (in container '')"))
    }

    fn overload(&mut self, id: u64, name: &str, of: &[&Type]) -> Type {
        let types: Vec<String> = of.iter().map(ToString::to_string).collect();
        let types = types.join(", ");
        self.wrong(id, format!("found no matching overload for '{name}' applied to '({types})'"))
    }

    fn kind(&mut self, node: &IdedExpr) -> Type {
        let kind = self.kind_of(node);
        if let Some(kinds) = &mut self.kinds {
            kinds.insert(node.id, kind.clone());
        }
        kind
    }

    fn kind_of(&mut self, node: &IdedExpr) -> Type {
        match &node.expr {
            Expr::Literal(literal) => literal_kind(literal),
            Expr::Ident(name) => self.ident(node.id, name),
            Expr::Select(select) => self.select(node.id, select),
            Expr::Call(call) => self.call(node.id, call),
            Expr::List(list) => {
                let mut of: Option<Type> = None;
                for (index, element) in list.elements.iter().enumerate() {
                    let mut kind = self.kind(element);
                    if let Type::Optional(inner) = &kind
                        && list.optional_indices.contains(&index)
                    {
                        kind = (**inner).clone();
                    }
                    of = Some(match of {
                        Some(known) => known.join(kind),
                        None => kind,
                    });
                }
                Type::list(of.unwrap_or_default())
            }
            Expr::Map(map) => Type::Map(Arc::new(self.entries(&map.entries))),
            Expr::Struct(of) => {
                self.entries(&of.entries);
                self.made(&of.type_name)
            }
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
            Expr::Unspecified => Type::Dyn,
        }
    }

    /// The type of a constructed object: `Object.spec{…}` if `Object` is known.
    fn made(&self, name: &str) -> Type {
        let first = name.split('.').next().unwrap_or_default();
        match self.variables.iter().any(|(known, kind)| *known == first && *kind == Type::Type) {
            true => Type::Object(Arc::new(Object {
                name: name.to_owned(),
                is_open: true,
                ..Object::default()
            })),
            false => Type::Dyn,
        }
    }

    fn entries(&mut self, entries: &[IdedEntryExpr]) -> Type {
        let mut of: Option<Type> = None;
        for entry in entries {
            let kind = match &entry.expr {
                EntryExpr::StructField(field) => self.kind(&field.value),
                EntryExpr::MapEntry(entry) => {
                    self.kind(&entry.key);
                    self.kind(&entry.value)
                }
            };
            of = Some(match of {
                Some(known) => known.join(kind),
                None => kind,
            });
        }
        of.unwrap_or_default()
    }

    fn ident(&mut self, id: u64, name: &str) -> Type {
        let name = name.trim_start_matches('.');
        if let Some((_, kind)) = self.bound.iter().rev().find(|(bound, _)| bound == name) {
            return kind.clone();
        }
        if let Some((_, kind)) = self.variables.iter().find(|(known, _)| *known == name) {
            return kind.clone();
        }
        match functions::type_named(name) {
            Some(_) => Type::Type,
            None => self.undeclared(id, name),
        }
    }

    fn select(&mut self, id: u64, select: &SelectExpr) -> Type {
        if let Expr::Ident(space) = &select.operand.expr
            && matches!(space.as_str(), "google" | "kubernetes" | "net")
            && !self.variables.iter().any(|(name, _)| name == space)
        {
            return Type::Dyn;
        }
        let operand = self.kind(&select.operand);
        let found = self.field(id, &operand, &select.field);
        if select.test { Type::Bool } else { found }
    }

    fn field(&mut self, id: u64, of: &Type, name: &str) -> Type {
        match of {
            Type::Dyn => Type::Dyn,
            Type::Map(of) => (**of).clone(),
            Type::Optional(inner) => {
                let inner = inner.clone();
                Type::optional(self.field(id, &inner, name))
            }
            Type::Object(object) => {
                let known = object.fields.get(name);
                let known = known.or_else(|| object.fields.get(&unescape(name)?));
                match known {
                    Some(kind) => kind.clone(),
                    None if object.is_open => Type::Dyn,
                    None => self.wrong(id, format!("undefined field '{name}'")),
                }
            }
            Type::Opaque(kind) if functions::is_external(kind) => Type::Opaque(kind),
            other => {
                let message = format!("type '{other}' does not support field selection");
                self.wrong(id, message)
            }
        }
    }

    fn call(&mut self, id: u64, call: &CallExpr) -> Type {
        let name = call.func_name.as_str();
        if let Some(kind) = self.macro_call(call) {
            return kind;
        }
        if let Some(target) = &call.target
            && let Expr::Ident(space) = &target.expr
            && functions::is_namespace(space)
            && !self.variables.iter().any(|(name, _)| name == space)
        {
            call.args.iter().for_each(|argument| drop(self.kind(argument)));
            let full = format!("{space}.{name}");
            return match functions::result_of(&full, false) {
                Some(kind) => kind,
                None => self.undeclared(id, &full),
            };
        }
        if name == operators::OPT_SELECT {
            return self.optional_select(id, call);
        }
        let target = call.target.as_deref().map(|target| self.kind(target));
        let arguments: Vec<Type> = call.args.iter().map(|argument| self.kind(argument)).collect();
        if call.target.is_none()
            && let Some(kind) = self.operator(id, name, &arguments)
        {
            return kind;
        }
        self.function(id, name, target.as_ref(), &arguments)
    }

    fn function(&mut self, id: u64, name: &str, target: Option<&Type>, arguments: &[Type]) -> Type {
        if let Some(Type::Opaque(kind)) = target
            && functions::is_external(kind)
        {
            // Methods of the authorizer return authorizer types; those of its decisions return these.
            return match name {
                "allowed" | "errored" => Type::Bool,
                "reason" | "error" => Type::String,
                _ => Type::Opaque(kind),
            };
        }
        let Some(kind) = functions::result_of(name, target.is_some()) else {
            return self.undeclared(id, name);
        };
        let all: Vec<&Type> = target.into_iter().chain(arguments).collect();
        if !functions::accepts(name, &all) {
            let shown = all.iter().map(ToString::to_string).collect::<Vec<String>>();
            let applied = match target {
                Some(target) => format!("{target}.({})", shown[1..].join(", ")),
                None => format!("({})", shown.join(", ")),
            };
            let message = format!("found no matching overload for '{name}' applied to '{applied}'");
            return self.wrong(id, message);
        }
        let element = |kind: &Type| match kind {
            Type::List(of, _) => (**of).clone(),
            _ => Type::Dyn,
        };
        match (name, target) {
            ("min" | "max", Some(list)) => element(list),
            ("sum", Some(list)) => element(list),
            ("sort" | "reverse" | "distinct" | "slice", Some(Type::List(of, _))) => {
                Type::List(of.clone(), ListKind::Atomic)
            }
            ("value", Some(Type::Optional(of))) => (**of).clone(),
            ("first" | "last", Some(list)) => Type::optional(element(list)),
            ("dyn", _) => Type::Dyn,
            _ => kind,
        }
    }

    fn optional_select(&mut self, id: u64, call: &CallExpr) -> Type {
        let [operand, name] = call.args.as_slice() else { return Type::Dyn };
        let operand = self.kind(operand);
        let Expr::Literal(LiteralValue::String(name)) = &name.expr else { return Type::Dyn };
        let inner = match operand {
            Type::Optional(inner) => (*inner).clone(),
            other => other,
        };
        Type::optional(self.field(id, &inner, name.inner()))
    }

    fn operator(&mut self, id: u64, name: &str, of: &[Type]) -> Option<Type> {
        let is_free = |kind: &Type| *kind == Type::Dyn;
        Some(match (name, of) {
            (operators::LOGICAL_AND | operators::LOGICAL_OR, [a, b]) => {
                let fits = [a, b].iter().all(|kind| is_free(kind) || **kind == Type::Bool);
                self.truth(fits, id, name, &[a, b])
            }
            (operators::LOGICAL_NOT, [a]) => {
                self.truth(is_free(a) || *a == Type::Bool, id, name, &[a])
            }
            (operators::NOT_STRICTLY_FALSE, [_]) => Type::Bool,
            (operators::EQUALS | operators::NOT_EQUALS, [a, b]) => {
                self.truth(a.fits(b), id, name, &[a, b])
            }
            (
                operators::LESS
                | operators::LESS_EQUALS
                | operators::GREATER
                | operators::GREATER_EQUALS,
                [a, b],
            ) => self.truth(are_ordered(a, b), id, name, &[a, b]),
            (operators::CONDITIONAL, [test, yes, no]) => {
                if (is_free(test) || *test == Type::Bool) && yes.fits(no) {
                    yes.clone().join(no.clone())
                } else {
                    self.overload(id, name, &[test, yes, no])
                }
            }
            (operators::IN, [item, of]) => match of {
                Type::Dyn | Type::Map(_) | Type::Object(_) => Type::Bool,
                Type::List(of_list, _) if item.fits(of_list) => Type::Bool,
                _ => self.overload(id, name, &[item, of]),
            },
            (operators::INDEX, [of, index]) => self.index(id, name, of, index),
            (operators::OPT_INDEX, [of, index]) => {
                let inner = match of {
                    Type::Optional(inner) => (**inner).clone(),
                    other => other.clone(),
                };
                Type::optional(self.index(id, name, &inner, index))
            }
            (operators::NEGATE, [a]) => match a {
                Type::Dyn | Type::Int | Type::Double => a.clone(),
                _ => self.overload(id, name, &[a]),
            },
            (
                operators::ADD
                | operators::SUBSTRACT
                | operators::MULTIPLY
                | operators::DIVIDE
                | operators::MODULO,
                [a, b],
            ) => match arithmetic(name, a, b) {
                Some(kind) => kind,
                None => self.overload(id, name, &[a, b]),
            },
            _ => return None,
        })
    }

    /// A boolean, or an error if the operands do not fit.
    fn truth(&mut self, fits: bool, id: u64, name: &str, of: &[&Type]) -> Type {
        if fits { Type::Bool } else { self.overload(id, name, of) }
    }

    fn index(&mut self, id: u64, name: &str, of: &Type, index: &Type) -> Type {
        match (of, index) {
            (Type::Dyn, _) => Type::Dyn,
            (Type::List(of, _), Type::Int | Type::Dyn) => (**of).clone(),
            (Type::Map(of), Type::String | Type::Dyn | Type::Int | Type::Bool) => (**of).clone(),
            (Type::Optional(inner), _) => {
                let inner = inner.clone();
                Type::optional(self.index(id, name, &inner, index))
            }
            (Type::Object(object), _) if object.is_open => Type::Dyn,
            _ => self.overload(id, name, &[of, index]),
        }
    }

    /// Macros that bind names.
    fn macro_call(&mut self, call: &CallExpr) -> Option<Type> {
        let name = call.func_name.as_str();
        let target = call.target.as_deref()?;
        let ident = |node: &IdedExpr| match &node.expr {
            Expr::Ident(name) => Some(name.clone()),
            _ => None,
        };
        match (name, call.args.as_slice()) {
            ("optMap" | "optFlatMap", [variable, body]) => {
                let inner = match self.kind(target) {
                    Type::Optional(inner) => (*inner).clone(),
                    _ => Type::Dyn,
                };
                let kind = self.within(vec![(ident(variable)?, inner)], body);
                Some(if name == "optMap" { Type::optional(kind) } else { kind })
            }
            ("bind", [variable, init, body]) if ident(target).as_deref() == Some("cel") => {
                let init = self.kind(init);
                Some(self.within(vec![(ident(variable)?, init)], body))
            }
            ("sortBy", [variable, key]) => {
                let list = self.kind(target);
                let of = if let Type::List(of, _) = &list { (**of).clone() } else { Type::Dyn };
                self.within(vec![(ident(variable)?, of)], key);
                Some(list)
            }
            ("or", [other]) => {
                let (kind, other) = (self.kind(target), self.kind(other));
                Some(kind.join(other))
            }
            ("orValue", [other]) => {
                let (kind, other) = (self.kind(target), self.kind(other));
                match kind {
                    Type::Optional(inner) => Some((*inner).clone().join(other)),
                    _ => Some(Type::Dyn),
                }
            }
            (
                "all" | "exists" | "exists_one" | "existsOne" | "transformList" | "transformMap"
                | "transformMapEntry",
                [first, second, rest @ ..],
            ) if matches!(rest.len(), 1 | 2) => {
                let (first, second) = (ident(first)?, ident(second)?);
                let (key, of) = match self.kind(target) {
                    Type::List(of, _) => (Type::Int, (*of).clone()),
                    Type::Map(of) => (Type::String, (*of).clone()),
                    _ => (Type::Dyn, Type::Dyn),
                };
                let bound = vec![(first, key), (second, of)];
                let mut kind = Type::Dyn;
                for body in rest {
                    kind = self.within(bound.clone(), body);
                }
                Some(match name {
                    "transformList" => Type::list(kind),
                    "transformMap" => Type::Map(Arc::new(kind)),
                    "transformMapEntry" => kind,
                    _ => Type::Bool,
                })
            }
            _ => None,
        }
    }

    fn within(&mut self, bound: Vec<(String, Type)>, body: &IdedExpr) -> Type {
        let depth = self.bound.len();
        self.bound.extend(bound);
        let kind = self.kind(body);
        self.bound.truncate(depth);
        kind
    }

    fn comprehension(&mut self, of: &ComprehensionExpr) -> Type {
        let range = self.kind(&of.iter_range);
        let element = match &range {
            Type::List(of, _) => (**of).clone(),
            Type::Map(_) => Type::String,
            Type::Dyn => Type::Dyn,
            other => {
                let message = format!(
                    "expression of type '{other}' cannot be range of a comprehension (must be list, map, or dynamic)"
                );
                self.wrong(of.iter_range.id, message)
            }
        };
        let init = self.kind(&of.accu_init);
        let depth = self.bound.len();
        self.bound.push((of.accu_var.clone(), init.clone()));
        self.bound.push((of.iter_var.clone(), element));
        self.kind(&of.loop_cond);
        let step = self.kind(&of.loop_step);
        self.bound.truncate(depth);
        self.bound.push((of.accu_var.clone(), init.join(step)));
        let kind = self.kind(&of.result);
        self.bound.truncate(depth);
        kind
    }
}

fn literal_kind(literal: &LiteralValue) -> Type {
    match literal {
        LiteralValue::Boolean(_) => Type::Bool,
        LiteralValue::Bytes(_) => Type::Bytes,
        LiteralValue::Double(_) => Type::Double,
        LiteralValue::Int(_) => Type::Int,
        LiteralValue::Null => Type::Null,
        LiteralValue::String(_) => Type::String,
        LiteralValue::UInt(_) => Type::Uint,
    }
}

fn arithmetic(name: &str, a: &Type, b: &Type) -> Option<Type> {
    use Type::{Bytes, Double, Duration, Dyn, Int, List, String, Timestamp, Uint};
    Some(match (a, b) {
        (Dyn, _) | (_, Dyn) => Dyn,
        (Int, Int) => Int,
        (Uint, Uint) => Uint,
        (Double, Double) if name != operators::MODULO => Double,
        (String, String) if name == operators::ADD => String,
        (Bytes, Bytes) if name == operators::ADD => Bytes,
        (List(a_of, kind), List(b_of, _)) if name == operators::ADD && a_of.fits(b_of) => {
            List(Arc::new((**a_of).clone().join((**b_of).clone())), kind.clone())
        }
        (Timestamp, Duration) if matches!(name, operators::ADD | operators::SUBSTRACT) => Timestamp,
        (Duration, Timestamp) if name == operators::ADD => Timestamp,
        (Timestamp, Timestamp) if name == operators::SUBSTRACT => Duration,
        (Duration, Duration) if matches!(name, operators::ADD | operators::SUBSTRACT) => Duration,
        _ => return None,
    })
}

/// Whether values of both types can be ordered.
fn are_ordered(a: &Type, b: &Type) -> bool {
    use Type::{Bool, Bytes, Double, Duration, Dyn, Int, String, Timestamp, Uint};
    let is_number = |kind: &Type| matches!(kind, Int | Uint | Double);
    let is_ordered = |kind: &Type| {
        is_number(kind) || matches!(kind, Dyn | Bool | String | Bytes | Timestamp | Duration)
    };
    (a.fits(b) || (is_number(a) && is_number(b))) && is_ordered(a) && is_ordered(b)
}

/// The field's name for an identifier: `a__dash__b` is `a-b`. `None`: the identifier itself.
pub fn unescape(name: &str) -> Option<String> {
    const SIGNS: &[(&str, &str)] =
        &[("__underscores__", "__"), ("__dot__", "."), ("__dash__", "-"), ("__slash__", "/")];
    if !name.contains("__") {
        return None;
    }
    let keyword = name.strip_prefix("__").and_then(|rest| rest.strip_suffix("__"));
    if let Some(word) = keyword.filter(|word| is_reserved(word)) {
        return Some(word.into());
    }
    let mut text = String::new();
    let mut rest = name;
    while !rest.is_empty() {
        match SIGNS.iter().find_map(|(escaped, sign)| Some((rest.strip_prefix(escaped)?, sign))) {
            Some((after, sign)) => {
                text.push_str(sign);
                rest = after;
            }
            None => {
                let next = rest.chars().next()?;
                text.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    Some(text)
}

fn is_reserved(word: &str) -> bool {
    const WORDS: &str = "true false null in as break const continue else for function if import let loop package namespace return var void while";
    WORDS.split(' ').any(|one| one == word)
}
