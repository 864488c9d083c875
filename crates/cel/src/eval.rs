//! Evaluates checked expressions within a budget.
//!
//! Every visited node costs one, creating lists and maps more, and functions by the size of their
//! arguments and results (`charge.rs`): roughly upstream's measure. An expression that would exceed its
//! budget is stopped before it takes the memory; nothing else limits nested loops.

use std::collections::BTreeMap;
use std::sync::Arc;

use cel_parser::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SelectExpr, operators,
};

use crate::charge;
use crate::functions;
use crate::types::ListKind;
use crate::value::{Key, Value, key_of};

const LIST_COST: u64 = 10;
const MAP_COST: u64 = 30;
/// Keys of a map that are copied for a cost of one.
const KEYS_PER_COST: u64 = 16;
/// The maximum recursion: the parser rejects deeper expressions.
const DEEPEST: usize = 400;

/// The remaining cost.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub left: u64,
}

impl Budget {
    pub fn new(left: u64) -> Self {
        Self { left }
    }

    fn spend(&mut self, cost: u64) -> Result<(), EvalError> {
        match self.left.checked_sub(cost) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.left = 0;
                Err(EvalError::TooExpensive)
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvalError {
    #[error("operation cancelled: actual cost limit exceeded")]
    TooExpensive,
    #[error("{0}")]
    Failed(String),
}

type Outcome = Result<Value, EvalError>;

fn failed<T>(why: impl Into<String>) -> Result<T, EvalError> {
    Err(EvalError::Failed(why.into()))
}

pub fn evaluate(
    root: &IdedExpr,
    variables: &dyn Fn(&str) -> Option<Value>,
    budget: &mut Budget,
) -> Outcome {
    let mut machine =
        Machine { variables, bound: vec![], known: BTreeMap::new(), budget, depth: 0 };
    let value = machine.eval(root)?;
    let cost = charge::result(&value, machine.budget.left);
    machine.budget.spend(cost)?;
    Ok(value)
}

struct Machine<'a> {
    variables: &'a dyn Fn(&str) -> Option<Value>,
    /// Variables of loops, innermost last.
    bound: Vec<(String, Value)>,
    /// Cached values of variables.
    known: BTreeMap<String, Value>,
    budget: &'a mut Budget,
    depth: usize,
}

impl Machine<'_> {
    fn eval(&mut self, node: &IdedExpr) -> Outcome {
        if self.depth >= DEEPEST {
            return failed("the expression is nested too deeply");
        }
        self.depth += 1;
        let outcome = self.eval_node(node);
        self.depth -= 1;
        outcome
    }

    fn eval_node(&mut self, node: &IdedExpr) -> Outcome {
        match &node.expr {
            Expr::Literal(literal) => Ok(literal_value(literal)),
            Expr::Ident(name) => {
                self.budget.spend(1)?;
                self.variable(name)
            }
            Expr::Select(select) => self.select(select),
            Expr::Call(call) => self.call(call),
            Expr::List(list) => {
                self.budget.spend(LIST_COST)?;
                let mut items = Vec::with_capacity(list.elements.len());
                for (index, element) in list.elements.iter().enumerate() {
                    match self.eval(element)? {
                        Value::Optional(inner) if list.optional_indices.contains(&index) => {
                            items.extend(inner.map(|value| (*value).clone()));
                        }
                        value => items.push(value),
                    }
                }
                Ok(Value::list(items))
            }
            Expr::Map(map) => {
                self.budget.spend(MAP_COST)?;
                let mut fields = BTreeMap::new();
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else { continue };
                    let key = self.eval(&entry.key)?;
                    let Some(key) = key.key() else {
                        return failed(format!("unsupported key type: {}", key.type_name()));
                    };
                    let value = self.eval(&entry.value)?;
                    put_entry(&mut fields, key, value, entry.optional)?;
                }
                Ok(Value::Map(Arc::new(fields)))
            }
            Expr::Struct(of) => {
                self.budget.spend(MAP_COST)?;
                let mut fields = BTreeMap::new();
                for entry in &of.entries {
                    let EntryExpr::StructField(field) = &entry.expr else { continue };
                    let value = self.eval(&field.value)?;
                    let key = Key::String(field.field.as_str().into());
                    put_entry(&mut fields, key, value, field.optional)?;
                }
                Ok(Value::Map(Arc::new(fields)))
            }
            Expr::Comprehension(comprehension) => self.comprehension(comprehension),
            Expr::Unspecified => failed("an empty expression"),
        }
    }

    fn variable(&mut self, name: &str) -> Outcome {
        let name = name.trim_start_matches('.');
        if let Some((_, value)) = self.bound.iter().rev().find(|(bound, _)| bound == name) {
            return Ok(value.clone());
        }
        if let Some(value) = self.known.get(name) {
            return Ok(value.clone());
        }
        if let Some(value) = (self.variables)(name) {
            self.known.insert(name.to_owned(), value.clone());
            return Ok(value);
        }
        match functions::type_named(name) {
            Some(value) => Ok(value),
            None => failed(format!("no such attribute(s): {name}")),
        }
    }

    fn select(&mut self, select: &SelectExpr) -> Outcome {
        if !select.test
            && let Some(name) = qualified(select)
            && let Some(value) = functions::type_named(&name)
        {
            return Ok(value);
        }
        let operand = self.eval(&select.operand)?;
        self.budget.spend(1)?;
        if let Value::Optional(inner) = &operand {
            let found = inner.as_ref().and_then(|value| field(value, &select.field));
            return Ok(if select.test {
                Value::Bool(found.is_some())
            } else {
                Value::Optional(found.map(Arc::new))
            });
        }
        // A host value's field is a method without arguments.
        if let Value::Host(host) = &operand
            && let Some(answer) = host.call(&select.field, &[])
        {
            return answer.map_err(EvalError::Failed);
        }
        if !matches!(operand, Value::Map(_)) {
            return failed(format!("no such key: {}", select.field));
        }
        let found = field(&operand, &select.field);
        if select.test {
            return Ok(Value::Bool(found.is_some()));
        }
        found.map_or_else(|| failed(format!("no such key: {}", select.field)), Ok)
    }

    fn call(&mut self, call: &CallExpr) -> Outcome {
        let name = call.func_name.as_str();
        if let Some(outcome) = self.special(name, call) {
            return outcome;
        }
        if name == operators::ADD
            && let Some(sum) = self.append(call)
        {
            return sum;
        }
        let namespaced = call.target.as_deref().and_then(|target| match &target.expr {
            Expr::Ident(space) if functions::is_namespace(space) && !self.is_bound(space) => {
                Some(format!("{space}.{name}"))
            }
            _ => None,
        });
        let target = match (&call.target, &namespaced) {
            (Some(target), None) => Some(self.eval(target)?),
            _ => None,
        };
        let mut arguments = Vec::with_capacity(call.args.len());
        for argument in &call.args {
            arguments.push(self.eval(argument)?);
        }
        let name = namespaced.as_deref().unwrap_or(name);
        let values: Vec<&Value> = target.iter().chain(&arguments).collect();
        self.pay(name, &values)?;
        match functions::call(name, target.as_ref(), &arguments) {
            Some(outcome) => outcome.map_err(EvalError::Failed),
            None => {
                let given = target.iter().chain(&arguments).map(Value::type_name);
                let given: Vec<&str> = given.collect();
                failed(format!("no such overload: {name}({})", given.join(", ")))
            }
        }
    }

    /// Pays for a call before it is made.
    fn pay(&mut self, name: &str, values: &[&Value]) -> Result<(), EvalError> {
        let Some(cost) = charge::call(name, values, self.budget.left) else {
            self.budget.left = 0;
            return Err(EvalError::TooExpensive);
        };
        self.budget.spend(cost.saturating_add(1))
    }

    fn is_bound(&self, name: &str) -> bool {
        self.bound.iter().any(|(bound, _)| bound == name) || (self.variables)(name).is_some()
    }

    /// Functions that do not evaluate all arguments, and macros that bind names.
    fn special(&mut self, name: &str, call: &CallExpr) -> Option<Outcome> {
        match (name, call.target.as_deref(), call.args.as_slice()) {
            (operators::LOGICAL_AND, None, [a, b]) => Some(self.logic(a, b, false)),
            (operators::LOGICAL_OR, None, [a, b]) => Some(self.logic(a, b, true)),
            (operators::CONDITIONAL, None, [test, yes, no]) => {
                Some(self.conditional(test, yes, no))
            }
            (operators::NOT_STRICTLY_FALSE, None, [test]) => Some(match self.eval(test) {
                Ok(value) => Ok(Value::Bool(value.as_bool() != Some(false))),
                Err(EvalError::TooExpensive) => Err(EvalError::TooExpensive),
                Err(_) => Ok(Value::Bool(true)),
            }),
            (operators::OPT_SELECT, None, [operand, name]) => {
                Some(self.optional_select(operand, name))
            }
            ("or" | "orValue", Some(target), [other]) => self.or_value(name, target, other),
            ("optMap" | "optFlatMap", Some(target), [variable, body]) => {
                Some(self.optional_map(name, target, variable, body))
            }
            ("bind", Some(target), [variable, init, body]) if is_ident(target, "cel") => {
                Some(self.bind(variable, init, body))
            }
            ("sortBy", Some(target), [variable, key]) => Some(self.sort_by(target, variable, key)),
            (
                "all" | "exists" | "exists_one" | "existsOne" | "transformList" | "transformMap"
                | "transformMapEntry",
                Some(target),
                [first, second, rest @ ..],
            ) if matches!(rest.len(), 1 | 2) => {
                Some(self.two_variables(name, target, [first, second], rest))
            }
            _ => None,
        }
    }

    /// One operand may decide, even if the other is an error.
    fn logic(&mut self, a: &IdedExpr, b: &IdedExpr, decides: bool) -> Outcome {
        self.budget.spend(1)?;
        let first = self.eval(a);
        if let Ok(Value::Bool(value)) = first
            && value == decides
        {
            return Ok(Value::Bool(decides));
        }
        if first == Err(EvalError::TooExpensive) {
            return first;
        }
        match (first, self.eval(b)) {
            (_, Err(EvalError::TooExpensive)) => Err(EvalError::TooExpensive),
            (_, Ok(Value::Bool(value))) if value == decides => Ok(Value::Bool(decides)),
            (Err(error), _) | (_, Err(error)) => Err(error),
            (Ok(Value::Bool(_)), Ok(Value::Bool(_))) => Ok(Value::Bool(!decides)),
            _ => failed("no such overload"),
        }
    }

    fn conditional(&mut self, test: &IdedExpr, yes: &IdedExpr, no: &IdedExpr) -> Outcome {
        self.budget.spend(1)?;
        match self.eval(test)? {
            Value::Bool(true) => self.eval(yes),
            Value::Bool(false) => self.eval(no),
            _ => failed("no such overload"),
        }
    }

    fn optional_select(&mut self, operand: &IdedExpr, name: &IdedExpr) -> Outcome {
        let operand = self.eval(operand)?;
        self.budget.spend(1)?;
        let Expr::Literal(LiteralValue::String(name)) = &name.expr else {
            return failed("unsupported optional field selection");
        };
        let inner = match &operand {
            Value::Optional(inner) => inner.as_deref(),
            value => Some(value),
        };
        let found = inner.and_then(|value| field(value, name.inner()));
        Ok(Value::Optional(found.map(Arc::new)))
    }

    fn or_value(&mut self, name: &str, target: &IdedExpr, other: &IdedExpr) -> Option<Outcome> {
        Some(match self.eval(target) {
            Ok(Value::Optional(Some(_))) if name == "or" => self.eval(target),
            Ok(Value::Optional(Some(inner))) => Ok((*inner).clone()),
            Ok(Value::Optional(None)) => self.eval(other),
            Ok(value) => failed(format!("no such overload: {}.{name}", value.type_name())),
            Err(error) => Err(error),
        })
    }

    fn optional_map(
        &mut self,
        name: &str,
        target: &IdedExpr,
        variable: &IdedExpr,
        body: &IdedExpr,
    ) -> Outcome {
        let Value::Optional(inner) = self.eval(target)? else {
            return failed(format!("no such overload: {name}"));
        };
        let Some(inner) = inner else { return Ok(Value::Optional(None)) };
        let value = self.with(variable, (*inner).clone(), body)?;
        match value {
            Value::Optional(_) if name == "optFlatMap" => Ok(value),
            value => Ok(Value::Optional(Some(Arc::new(value)))),
        }
    }

    fn bind(&mut self, variable: &IdedExpr, init: &IdedExpr, body: &IdedExpr) -> Outcome {
        let value = self.eval(init)?;
        self.with(variable, value, body)
    }

    fn with(&mut self, variable: &IdedExpr, value: Value, body: &IdedExpr) -> Outcome {
        let Expr::Ident(name) = &variable.expr else {
            return failed("argument must be a simple name");
        };
        self.bound.push((name.clone(), value));
        let outcome = self.eval(body);
        self.bound.pop();
        outcome
    }

    fn sort_by(&mut self, target: &IdedExpr, variable: &IdedExpr, key: &IdedExpr) -> Outcome {
        let Value::List(items, _) = self.eval(target)? else {
            return failed("no such overload: sortBy");
        };
        let mut keyed = Vec::with_capacity(items.len());
        for item in items.iter() {
            keyed.push((self.with(variable, item.clone(), key)?, item.clone()));
        }
        let keys = Value::list(keyed.iter().map(|(key, _)| key.clone()).collect());
        self.pay("sort", &[&keys])?;
        keyed.sort_by(|a, b| a.0.compare(&b.0).unwrap_or(std::cmp::Ordering::Equal));
        Ok(Value::list(keyed.into_iter().map(|(_, item)| item).collect()))
    }

    /// The macros with two variables: index and element, or key and value.
    fn two_variables(
        &mut self,
        name: &str,
        target: &IdedExpr,
        variables: [&IdedExpr; 2],
        rest: &[IdedExpr],
    ) -> Outcome {
        let [Expr::Ident(first), Expr::Ident(second)] = variables.map(|one| &one.expr) else {
            return failed("argument must be a simple name");
        };
        let range = self.eval(target)?;
        let (filter, body) = match rest {
            [body] => (None, body),
            [filter, body, ..] => (Some(filter), body),
            [] => return failed("missing argument"),
        };
        let (mut count, mut items, mut fields) = (0, vec![], BTreeMap::new());
        let mut doubt = None;
        if let Value::Host(host) = &range {
            return failed(format!("no such overload: iteration over {}", host.type_name()));
        }
        for (at, item) in self.items(&range)?.enumerate() {
            self.budget.spend(1)?;
            let (key, value) = match &range {
                Value::Map(fields) => {
                    let value = item.key().and_then(|key| fields.get(&key).cloned());
                    (item, value.unwrap_or(Value::Null))
                }
                _ => (Value::Int(at as i64), item),
            };
            self.bound.push((first.clone(), key.clone()));
            self.bound.push((second.clone(), value));
            let kept = filter.map_or(Ok(Value::Bool(true)), |filter| self.eval(filter));
            let is_kept = matches!(&kept, Ok(Value::Bool(true)));
            let outcome = match kept {
                Err(error) => Err(error),
                Ok(_) if is_kept => self.eval(body),
                Ok(_) => Ok(Value::Null),
            };
            self.bound.truncate(self.bound.len() - 2);
            match (name, outcome) {
                (_, Err(EvalError::TooExpensive)) => return Err(EvalError::TooExpensive),
                ("all", Ok(Value::Bool(false))) => return Ok(Value::Bool(false)),
                ("exists", Ok(Value::Bool(true))) => return Ok(Value::Bool(true)),
                ("all" | "exists", Err(error)) => doubt = Some(error),
                (_, Err(error)) => return Err(error),
                ("exists_one" | "existsOne", Ok(Value::Bool(true))) => count += 1,
                ("transformList", Ok(value)) if is_kept => items.push(value),
                ("transformMap", Ok(value)) if is_kept => {
                    fields.extend(key.key().map(|key| (key, value)));
                }
                ("transformMapEntry", Ok(Value::Map(entry))) => {
                    for (key, value) in entry.iter() {
                        put_entry(&mut fields, key.clone(), value.clone(), false)?;
                    }
                }
                _ => {}
            }
        }
        match (name, doubt) {
            (_, Some(error)) => Err(error),
            ("all", _) => Ok(Value::Bool(true)),
            ("exists", _) => Ok(Value::Bool(false)),
            ("exists_one" | "existsOne", _) => Ok(Value::Bool(count == 1)),
            ("transformList", _) => Ok(Value::list(items)),
            _ => Ok(Value::Map(Arc::new(fields))),
        }
    }

    /// `@result + [x]`: the step of loops that build lists. Done in place; otherwise it would be quadratic.
    fn append(&mut self, call: &CallExpr) -> Option<Outcome> {
        let [IdedExpr { expr: Expr::Ident(name), .. }, IdedExpr { expr: Expr::List(list), .. }] =
            call.args.as_slice()
        else {
            return None;
        };
        let at =
            self.bound.iter().rposition(|(bound, _)| bound == name && name.starts_with('@'))?;
        let [element] = list.elements.as_slice() else { return None };
        let value = match self.budget.spend(2).and_then(|()| self.eval(element)) {
            Ok(value) => value,
            Err(error) => return Some(Err(error)),
        };
        let taken = std::mem::replace(&mut self.bound[at].1, Value::Null);
        let Value::List(mut items, kind) = taken else {
            self.bound[at].1 = taken;
            return None;
        };
        Arc::make_mut(&mut items).push(value);
        Some(Ok(Value::List(items, kind)))
    }

    fn comprehension(&mut self, of: &ComprehensionExpr) -> Outcome {
        let range = self.eval(&of.iter_range)?;
        let items = self.items(&range)?;
        let init = self.eval(&of.accu_init)?;
        let depth = self.bound.len();
        self.bound.push((of.accu_var.clone(), init));
        let outcome = self.iterate(of, items, depth);
        self.bound.truncate(depth);
        outcome
    }

    /// The items of a list, without copying, or the keys of a map.
    fn items(&mut self, range: &Value) -> Result<Box<dyn Iterator<Item = Value>>, EvalError> {
        if let Value::List(items, _) = range {
            let items = items.clone();
            return Ok(Box::new((0..items.len()).map(move |at| items[at].clone())));
        }
        let fields = match range {
            Value::Map(fields) => fields,
            Value::Host(host) if let Some((Value::Map(fields), _)) = host.as_map() => fields,
            other => {
                return failed(format!("no such overload: iteration over {}", other.type_name()));
            }
        };
        self.budget.spend(fields.len() as u64 / KEYS_PER_COST)?;
        let keys: Vec<Value> = fields.keys().map(Key::value).collect();
        Ok(Box::new(keys.into_iter()))
    }

    fn iterate(
        &mut self,
        of: &ComprehensionExpr,
        items: Box<dyn Iterator<Item = Value>>,
        accu: usize,
    ) -> Outcome {
        let mut doubt = None;
        for item in items {
            self.budget.spend(1)?;
            self.bound.push((of.iter_var.clone(), item));
            let goes_on = match doubt {
                None => self.eval(&of.loop_cond)?.as_bool() != Some(false),
                Some(_) => true,
            };
            if !goes_on {
                self.bound.pop();
                break;
            }
            let step = self.eval(&of.loop_step);
            self.bound.pop();
            match step {
                Ok(value) => {
                    let decides = is_decided(of, &value);
                    self.bound[accu].1 = value;
                    if decides {
                        doubt = None;
                        break;
                    }
                }
                Err(EvalError::TooExpensive) => return Err(EvalError::TooExpensive),
                // A later element may still decide `all` and `exists`.
                Err(error) if is_logical(of) => doubt = Some(error),
                Err(error) => return Err(error),
            }
        }
        match doubt {
            Some(error) => Err(error),
            None => self.eval(&of.result),
        }
    }
}

fn is_logical(of: &ComprehensionExpr) -> bool {
    matches!(&of.loop_step.expr, Expr::Call(call)
        if call.func_name == operators::LOGICAL_AND || call.func_name == operators::LOGICAL_OR)
}

fn is_decided(of: &ComprehensionExpr, value: &Value) -> bool {
    match (&of.loop_step.expr, value) {
        (Expr::Call(call), Value::Bool(value)) => {
            (call.func_name == operators::LOGICAL_AND && !value)
                || (call.func_name == operators::LOGICAL_OR && *value)
        }
        _ => false,
    }
}

fn is_ident(node: &IdedExpr, name: &str) -> bool {
    matches!(&node.expr, Expr::Ident(ident) if ident == name)
}

/// Qualified names such as `google.protobuf.Timestamp`.
fn qualified(select: &SelectExpr) -> Option<String> {
    let mut parts = vec![select.field.as_str()];
    let mut at = &select.operand.expr;
    loop {
        match at {
            Expr::Ident(name) => {
                parts.push(name);
                parts.reverse();
                return Some(parts.join("."));
            }
            Expr::Select(inner) if !inner.test => {
                parts.push(&inner.field);
                at = &inner.operand.expr;
            }
            _ => return None,
        }
    }
}

fn put_entry(
    fields: &mut BTreeMap<Key, Value>,
    key: Key,
    value: Value,
    is_optional: bool,
) -> Result<(), EvalError> {
    let value = match value {
        Value::Optional(None) if is_optional => return Ok(()),
        Value::Optional(Some(inner)) if is_optional => (*inner).clone(),
        value => value,
    };
    if fields.contains_key(&key) {
        return failed(format!("Failed with repeated key: {key}"));
    }
    fields.insert(key, value);
    Ok(())
}

/// A field by its name, or by the escaped form of a name that is no identifier.
pub fn field(of: &Value, name: &str) -> Option<Value> {
    let Value::Map(fields) = of else { return None };
    let find = |name: &str| fields.get(&Key::String(name.into())).cloned();
    find(name).or_else(|| find(&crate::check::unescape(name)?))
}

fn literal_value(literal: &LiteralValue) -> Value {
    match literal {
        LiteralValue::Boolean(flag) => Value::Bool(*flag.inner()),
        LiteralValue::Bytes(bytes) => Value::Bytes(bytes.inner().into()),
        LiteralValue::Double(number) => Value::Double(*number.inner()),
        LiteralValue::Int(number) => Value::Int(*number.inner()),
        LiteralValue::Null => Value::Null,
        LiteralValue::String(text) => Value::string(text.inner()),
        LiteralValue::UInt(number) => Value::Uint(*number.inner()),
    }
}

/// Adds lists, by the kind of the first.
pub fn concat(a: &[Value], b: &[Value], kind: &ListKind) -> Value {
    let mut all = a.to_vec();
    match kind {
        ListKind::Atomic => all.extend_from_slice(b),
        ListKind::Set => {
            for item in b {
                if !all.contains(item) {
                    all.push(item.clone());
                }
            }
        }
        ListKind::Map(keys) => {
            for item in b {
                let key = key_of(item, keys);
                match all.iter_mut().find(|known| key_of(known, keys) == key) {
                    Some(known) => *known = item.clone(),
                    None => all.push(item.clone()),
                }
            }
        }
    }
    Value::List(Arc::new(all), kind.clone())
}
