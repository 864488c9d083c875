//! Estimates the maximum cost of an expression before it runs.
//!
//! In: a checked expression, and the maximum sizes of its variables. Out: an upper bound in
//! upstream's unit. Definitions are rejected by this number, so it must equal upstream's exactly:
//! `cel-go/checker/cost.go` with the functions of `k8s.io/apiserver/pkg/cel/library/cost.go`.
//!
//! ```text
//!  self.a.all(x, x == 'b')   with at most 10 items of at most 5 characters
//!  1 + 1  +  10 × (2 + 1 + 1 + ⌈min(5, 1) × 0.1⌉)  +  1
//! ```
//!
//! Sizes are tracked along paths from the variable (`self.a.@items`), and through results of functions;
//! an unknown size has no bound.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use cel_parser::common::ast::{
    CallExpr, ComprehensionExpr, EntryExpr, Expr, IdedExpr, LiteralValue, SelectExpr, operators,
};

use crate::check;
use crate::functions;
use crate::library_cost;
use crate::types::Type;

/// The cost factor of traversing a text, per character.
pub(crate) const TEXT: f64 = 0.1;
pub(crate) const PATTERN: f64 = 0.25;
const LIST: u64 = 10;
const MAP: u64 = 30;
const STRUCT: u64 = 40;

/// The maximum sizes of a declaration's values.
#[derive(Debug, Default)]
pub struct Extent {
    /// Characters, items or entries; 0 for other types.
    pub most: u64,
    /// The extent of a list's items or a map's values.
    pub elements: Option<Arc<Extent>>,
    pub is_map: bool,
    pub fields: BTreeMap<String, Arc<Extent>>,
}

/// Minimum and maximum; overflowing numbers saturate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Range {
    pub min: u64,
    pub max: u64,
}

impl Range {
    pub const UNKNOWN: Self = Self { min: 0, max: u64::MAX };
    const NOTHING: Self = Self { min: u64::MAX, max: 0 };

    pub fn fixed(number: u64) -> Self {
        Self { min: number, max: number }
    }

    pub fn plus(self, other: Self) -> Self {
        Self { min: self.min.saturating_add(other.min), max: self.max.saturating_add(other.max) }
    }

    pub fn by(self, other: Self) -> Self {
        Self { min: self.min.saturating_mul(other.min), max: self.max.saturating_mul(other.max) }
    }

    pub fn scaled(self, factor: f64) -> Self {
        // Casts of floats saturate.
        let scale = |number: u64| (number as f64 * factor).ceil() as u64;
        Self { min: scale(self.min), max: scale(self.max) }
    }

    pub fn or(self, other: Self) -> Self {
        Self { min: self.min.min(other.min), max: self.max.max(other.max) }
    }
}

/// The sizes of a container's keys and values.
#[derive(Clone, Copy)]
struct Entries {
    is_list: bool,
    key: Range,
    value: Range,
}

/// A path from a variable: field names, `@items`, `@values`, `@keys`.
type Trail = Vec<Arc<str>>;

#[derive(Clone, Default)]
struct Local {
    name: String,
    trail: Trail,
    size: Option<Range>,
    entries: Option<Entries>,
}

/// The cost of a call besides its arguments, and the size of its result.
pub(crate) type Call = (Range, Option<Range>);

pub(crate) struct Coster<'a> {
    root: &'a Extent,
    kinds: HashMap<u64, Type>,
    locals: Vec<Local>,
    trails: HashMap<u64, Trail>,
    sizes: HashMap<u64, Range>,
    entries: HashMap<u64, Entries>,
}

/// The upper bound. All variables have the extent `root`: they are a value's new and old state.
pub(crate) fn most(root: &IdedExpr, variables: &[(&str, Type)], extent: &Extent) -> u64 {
    let mut coster = Coster {
        root: extent,
        kinds: check::kinds(root, variables),
        locals: vec![],
        trails: HashMap::new(),
        sizes: HashMap::new(),
        entries: HashMap::new(),
    };
    coster.cost(root).max
}

const ONE: Range = Range { min: 1, max: 1 };
const FREE: Range = Range { min: 0, max: 0 };

impl Coster<'_> {
    fn cost(&mut self, node: &IdedExpr) -> Range {
        match &node.expr {
            Expr::Literal(_) | Expr::Unspecified => FREE,
            Expr::Ident(name) => {
                let trail = match self.local(name) {
                    Some(local) => local.trail.clone(),
                    None => vec![name.as_str().into()],
                };
                self.trails.insert(node.id, trail);
                ONE
            }
            Expr::Select(select) => self.select(node.id, select),
            Expr::Call(call) => self.call(node, call),
            Expr::List(list) => {
                let mut sum = Range::fixed(LIST);
                let mut value = Range::NOTHING;
                for element in &list.elements {
                    sum = sum.plus(self.cost(element));
                    value = value.or(self.size(element));
                }
                let value = if list.elements.is_empty() { FREE } else { value };
                self.entries.insert(node.id, Entries { is_list: true, key: ONE, value });
                sum
            }
            Expr::Map(map) => self.map(node.id, &map.entries),
            Expr::Struct(of) => {
                of.entries.iter().fold(Range::fixed(STRUCT), |sum, entry| match &entry.expr {
                    EntryExpr::StructField(field) => sum.plus(self.cost(&field.value)),
                    EntryExpr::MapEntry(entry) => sum.plus(self.cost(&entry.value)),
                })
            }
            Expr::Comprehension(comprehension) => self.comprehension(node, comprehension),
        }
    }

    fn select(&mut self, id: u64, select: &SelectExpr) -> Range {
        let operand = self.cost(&select.operand);
        if select.test {
            // A test for a field's presence costs nothing.
            return operand;
        }
        let mut trail = self.trail(&select.operand);
        trail.push(select.field.as_str().into());
        self.trails.insert(id, trail);
        match self.kind(&select.operand) {
            Type::Map(_) | Type::Object(_) => operand.plus(ONE),
            _ => operand,
        }
    }

    fn map(&mut self, id: u64, all: &[cel_parser::common::ast::IdedEntryExpr]) -> Range {
        let mut sum = Range::fixed(MAP);
        let (mut key, mut value) = (Range::NOTHING, Range::NOTHING);
        for entry in all {
            let EntryExpr::MapEntry(entry) = &entry.expr else { continue };
            sum = sum.plus(self.cost(&entry.key)).plus(self.cost(&entry.value));
            key = key.or(self.size(&entry.key));
            value = value.or(self.size(&entry.value));
        }
        if all.is_empty() {
            (key, value) = (FREE, FREE);
        }
        self.entries.insert(id, Entries { is_list: false, key, value });
        sum
    }

    fn call(&mut self, node: &IdedExpr, call: &CallExpr) -> Range {
        let name = call.func_name.as_str();
        if let Some(cost) = self.macro_call(node, call) {
            return cost;
        }
        if let ("dyn", [inner]) = (name, call.args.as_slice()) {
            let cost = self.cost(inner).plus(ONE);
            self.copy_sizes(node.id, inner);
            return cost;
        }
        let namespaced = call.target.as_deref().and_then(|target| match &target.expr {
            Expr::Ident(space) if functions::is_namespace(space) && self.local(space).is_none() => {
                Some(format!("{space}.{name}"))
            }
            _ => None,
        });
        let target = call.target.as_deref().filter(|_| namespaced.is_none());
        let costs: Vec<Range> = call.args.iter().map(|one| self.cost(one)).collect();
        let sum = target.map_or(FREE, |target| self.cost(target));
        let name = namespaced.as_deref().unwrap_or(name);
        let (cost, result) = self.function(node.id, name, target, &call.args, &costs);
        let result = match (name, call.args.first()) {
            (operators::INDEX, Some(of)) => self.indexed(node.id, of),
            _ => result,
        };
        if let Some(size) = result.or_else(|| self.known_size(node)) {
            self.sizes.insert(node.id, size);
        }
        sum.plus(cost)
    }

    /// The size of a container's element, whose path is recorded.
    fn indexed(&mut self, id: u64, of: &IdedExpr) -> Option<Range> {
        let step = if matches!(self.kind(of), Type::Map(_)) { "@values" } else { "@items" };
        let mut trail = self.trail(of);
        trail.push(step.into());
        self.trails.insert(id, trail);
        self.entries_of(of).map(|entries| entries.value)
    }

    /// Includes the costs of the arguments.
    fn function(
        &mut self,
        id: u64,
        name: &str,
        target: Option<&IdedExpr>,
        args: &[IdedExpr],
        costs: &[Range],
    ) -> Call {
        let sum = costs.iter().fold(FREE, |sum, cost| sum.plus(*cost));
        if let Some((cost, size)) = library_cost::call(self, name, target, args) {
            return (cost.plus(sum), size);
        }
        match (name, args, costs) {
            (operators::LOGICAL_AND | operators::LOGICAL_OR, [_, _], [first, _]) => {
                (Range { min: first.min, max: sum.max }, None)
            }
            (operators::CONDITIONAL, [_, yes, no], [test, cost_yes, cost_no]) => {
                let size = self.size(yes).or(self.size(no));
                if let (Some(yes), Some(no)) = (self.entries_of(yes), self.entries_of(no)) {
                    self.entries.insert(id, yes.or(no));
                }
                (test.plus(cost_yes.or(*cost_no)), Some(size))
            }
            (operators::ADD, [a, b], _) => {
                if let (Some(a), Some(b)) = (self.entries_of(a), self.entries_of(b)) {
                    self.entries.insert(id, a.or(b));
                }
                let (cost, size) = self.addition(a, b);
                (cost.plus(sum), size)
            }
            (operators::EQUALS | operators::NOT_EQUALS, [a, b], _) => {
                (self.compared(a, b).plus(sum), None)
            }
            (
                operators::LESS
                | operators::LESS_EQUALS
                | operators::GREATER
                | operators::GREATER_EQUALS,
                [a, b],
                _,
            ) => (self.ordered(a, b).plus(sum), None),
            (operators::IN, [_, of], _) => {
                let cost = match self.kind(of) {
                    Type::List(..) => self.size(of),
                    Type::Dyn => self.size(of).or(ONE),
                    _ => ONE,
                };
                (cost.plus(sum), None)
            }
            _ => (ONE.plus(sum), None),
        }
    }

    fn addition(&mut self, a: &IdedExpr, b: &IdedExpr) -> Call {
        let size = self.size(a).plus(self.size(b));
        let could_be = |coster: &Self, test: fn(&Type) -> bool| {
            [a, b].iter().all(|one| *coster.kind(one) == Type::Dyn || test(coster.kind(one)))
        };
        let is_text = could_be(self, |kind| matches!(kind, Type::String | Type::Bytes));
        let is_list = could_be(self, |kind| matches!(kind, Type::List(..)));
        let is_number = could_be(self, |kind| {
            matches!(kind, Type::Int | Type::Uint | Type::Double | Type::Duration | Type::Timestamp)
        });
        let text = is_text.then(|| size.scaled(TEXT));
        let other = (is_list || is_number).then_some(ONE);
        let cost = [text, other].into_iter().flatten().reduce(Range::or).unwrap_or(ONE);
        (cost, (is_text || is_list).then_some(size))
    }

    /// The cost of traversing the shorter of two.
    fn compared(&mut self, a: &IdedExpr, b: &IdedExpr) -> Range {
        let shorter = self.size(a).max.min(self.size(b).max);
        Range { min: u64::from(shorter > 0), max: shorter }.scaled(TEXT)
    }

    fn ordered(&mut self, a: &IdedExpr, b: &IdedExpr) -> Range {
        let is = |kind: &Type| matches!(kind, Type::String | Type::Bytes);
        match (self.kind(a).clone(), self.kind(b).clone()) {
            (Type::Dyn, Type::Dyn) => self.compared(a, b).or(ONE),
            (a_kind, b_kind) if is(&a_kind) || is(&b_kind) => self.compared(a, b),
            _ => ONE,
        }
    }

    fn comprehension(&mut self, node: &IdedExpr, of: &ComprehensionExpr) -> Range {
        let mut sum = self.cost(&of.iter_range).plus(self.cost(&of.accu_init));
        self.push_value(&of.accu_var, &of.accu_init);
        self.push_element(&of.iter_var, &of.iter_range);
        let looped = self.cost(&of.loop_cond).plus(self.cost(&of.loop_step));
        self.locals.pop();
        sum = sum.plus(self.cost(&of.result));
        self.locals.pop();
        let count = self.size(&of.iter_range);
        match &of.accu_init.expr {
            Expr::Literal(_) => {
                let size = self.known_size(&of.accu_init);
                self.sizes.extend(size.map(|size| (node.id, size)));
            }
            Expr::List(_) | Expr::Map(_) => {
                self.sizes.insert(node.id, count);
                let entries = self.entries_of(&of.loop_step);
                self.entries.extend(entries.map(|entries| (node.id, entries)));
            }
            _ => {}
        }
        sum.plus(count.by(looped))
    }

    /// The cost of the comprehension to which upstream's parser expands the macro.
    fn macro_call(&mut self, node: &IdedExpr, call: &CallExpr) -> Option<Range> {
        let target = call.target.as_deref()?;
        let ident = |node: &IdedExpr| match &node.expr {
            Expr::Ident(name) => Some(name.clone()),
            _ => None,
        };
        match (call.func_name.as_str(), call.args.as_slice()) {
            ("bind", [variable, init, body]) if ident(target).as_deref() == Some("cel") => {
                let sum = Range::fixed(LIST).plus(self.cost(init));
                self.push_value(&ident(variable)?, init);
                let sum = sum.plus(self.cost(body));
                self.copy_sizes(node.id, body);
                self.locals.pop();
                Some(sum)
            }
            ("optMap" | "optFlatMap", [variable, body]) => {
                let inner = self.cost(target).plus(ONE);
                self.locals.push(Local { name: ident(variable)?, ..Local::default() });
                let bound = self.cost(body).plus(inner).plus(Range::fixed(LIST + 1));
                self.locals.pop();
                Some(inner.plus(bound.or(ONE)))
            }
            ("sortBy", [variable, key]) => {
                let list = self.cost(target);
                self.push_element(&ident(variable)?, target);
                let each = self.cost(key).plus(Range::fixed(LIST + 3));
                self.locals.pop();
                let count = self.size(target);
                self.sizes.insert(node.id, count);
                Some(list.plus(Range::fixed(LIST)).plus(count.by(each)))
            }
            (
                name @ ("all" | "exists" | "exists_one" | "existsOne" | "transformList"
                | "transformMap" | "transformMapEntry"),
                [first, second, rest @ ..],
            ) if matches!(rest.len(), 1 | 2) => {
                let variables = [ident(first)?, ident(second)?];
                Some(self.two_variables(node.id, name, target, variables, rest))
            }
            _ => None,
        }
    }

    fn two_variables(
        &mut self,
        id: u64,
        name: &str,
        target: &IdedExpr,
        variables: [String; 2],
        rest: &[IdedExpr],
    ) -> Range {
        let range = self.cost(target);
        let entries = self.entries_of(target);
        let is_list = match entries {
            Some(entries) => entries.is_list,
            None => matches!(self.kind(target), Type::List(..)),
        };
        let steps = if is_list { ["@indices", "@items"] } else { ["@keys", "@values"] };
        let sizes = [entries.map(|one| one.key), entries.map(|one| one.value)];
        for ((name, step), size) in variables.into_iter().zip(steps).zip(sizes) {
            let mut trail = self.trail(target);
            trail.push(step.into());
            self.locals.push(Local { name, trail, size, entries: None });
        }
        let costs: Vec<Range> = rest.iter().map(|one| self.cost(one)).collect();
        self.locals.truncate(self.locals.len() - 2);
        let body = costs.last().copied().unwrap_or(FREE);
        // The initial value, each step besides the body, and the result.
        let (first, step, result) = match name {
            "all" => (0, 3, 1),
            "exists" => (0, 4, 1),
            "exists_one" | "existsOne" => (0, 2, 2),
            "transformList" => (LIST, 2 + LIST, 1),
            "transformMap" => (MAP, 3, 1),
            _ => (MAP, 2, 1),
        };
        let mut each = body.plus(Range::fixed(step));
        if let [filter, _] = costs[..] {
            each = filter.plus(each.or(ONE));
        }
        let count = self.size(target);
        if first > 0 {
            self.sizes.insert(id, count);
        }
        range.plus(Range::fixed(first + result)).plus(count.by(each))
    }

    /// Adds a variable with a value.
    fn push_value(&mut self, name: &str, value: &IdedExpr) {
        let (trail, size) = (self.trail(value), self.known_size(value));
        let entries = self.entries_of(value);
        self.locals.push(Local { name: name.to_owned(), trail, size, entries });
    }

    /// Adds a variable for a list's items or a map's keys.
    fn push_element(&mut self, name: &str, of: &IdedExpr) {
        let entries = self.entries_of(of);
        let is_list = match entries {
            Some(entries) => entries.is_list,
            None => matches!(self.kind(of), Type::List(..)),
        };
        let size = entries.map(|one| if is_list { one.value } else { one.key });
        let mut trail = self.trail(of);
        trail.push(if is_list { "@items" } else { "@keys" }.into());
        self.locals.push(Local { name: name.to_owned(), trail, size, entries: None });
    }

    fn local(&self, name: &str) -> Option<&Local> {
        self.locals.iter().rev().find(|local| local.name == name)
    }

    pub(crate) fn kind(&self, node: &IdedExpr) -> &Type {
        self.kinds.get(&node.id).unwrap_or(&Type::Dyn)
    }

    fn trail(&self, node: &IdedExpr) -> Trail {
        if let Expr::Ident(name) = &node.expr
            && let Some(local) = self.local(name)
        {
            return local.trail.clone();
        }
        self.trails.get(&node.id).cloned().unwrap_or_default()
    }

    fn entries_of(&self, node: &IdedExpr) -> Option<Entries> {
        if let Some(known) = self.entries.get(&node.id) {
            return Some(*known);
        }
        match &node.expr {
            Expr::Ident(name) => self.local(name)?.entries,
            _ => None,
        }
    }

    fn copy_sizes(&mut self, id: u64, from: &IdedExpr) {
        let (size, entries) = (self.known_size(from), self.entries_of(from));
        self.sizes.extend(size.map(|size| (id, size)));
        self.entries.extend(entries.map(|entries| (id, entries)));
    }

    pub(crate) fn size(&mut self, node: &IdedExpr) -> Range {
        self.known_size(node).unwrap_or(Range::UNKNOWN)
    }

    /// The size of a list's items; unknown if the declaration does not have it.
    pub(crate) fn item_size(&self, list: &IdedExpr) -> Range {
        let mut trail = self.trail(list);
        if trail.is_empty() {
            return Range::UNKNOWN;
        }
        trail.push("@items".into());
        self.declared(&trail).unwrap_or(Range::UNKNOWN)
    }

    fn known_size(&mut self, node: &IdedExpr) -> Option<Range> {
        if let Some(known) = self.sizes.get(&node.id) {
            return Some(*known);
        }
        if let Some(size) = literal_size(&node.expr) {
            return Some(Range::fixed(size));
        }
        let trail = self.trail(node);
        if let Some(size) = self.declared(&trail) {
            self.sizes.insert(node.id, size);
            return Some(size);
        }
        if is_scalar(self.kind(node)) {
            return Some(ONE);
        }
        match &node.expr {
            Expr::Ident(name) => self.local(name)?.size,
            _ => None,
        }
    }

    fn declared(&self, trail: &[Arc<str>]) -> Option<Range> {
        let (_, below) = trail.split_first()?;
        let mut at = self.root;
        for step in below {
            at = match &**step {
                "@items" | "@values" => at.elements.as_deref()?,
                "@keys" if at.is_map => return Some(FREE),
                name => {
                    let field = at.fields.get(name);
                    field.or_else(|| at.fields.get(&check::unescape(name)?))?
                }
            };
        }
        Some(Range { min: 0, max: at.most })
    }
}

impl Entries {
    fn or(self, other: Self) -> Self {
        Self {
            is_list: self.is_list,
            key: self.key.or(other.key),
            value: self.value.or(other.value),
        }
    }
}

fn literal_size(expr: &Expr) -> Option<u64> {
    Some(match expr {
        Expr::Literal(LiteralValue::String(text)) => text.inner().chars().count() as u64,
        Expr::Literal(LiteralValue::Bytes(bytes)) => bytes.inner().len() as u64,
        Expr::Literal(_) => 1,
        Expr::List(list) => list.elements.len() as u64,
        Expr::Map(map) => map.entries.len() as u64,
        _ => return None,
    })
}

/// Whether all values of the type have one size.
fn is_scalar(kind: &Type) -> bool {
    match kind {
        Type::Bool | Type::Double | Type::Duration | Type::Int | Type::Timestamp | Type::Uint => {
            true
        }
        Type::Optional(of) => is_scalar(of),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(most: u64) -> Arc<Extent> {
        Arc::new(Extent { most, ..Extent::default() })
    }

    fn list(most: u64, elements: Arc<Extent>) -> Extent {
        Extent { most, elements: Some(elements), ..Extent::default() }
    }

    fn check(rule: &str, kind: Type, extent: &Extent, expected: u64) {
        let variables = [("self", kind.clone()), ("oldSelf", kind)];
        let program = crate::compile(rule, &variables).expect("an expression");
        assert_eq!(program.most(&variables, extent), expected, "{rule}");
    }

    /// Upstream's own numbers.
    #[test]
    fn lists_cost_the_same_as_upstream() {
        let numbers = |most| list(most, text(0));
        let of = || Type::list(Type::Double);
        check("self.all(x, true)", of(), &numbers(1_572_863), 4_718_591);
        check("self.all(x, true)", of(), &numbers(10), 32);
        check("self.all(x, self.all(y, true))", of(), &numbers(10), 352);
        check("self.all(x, self.all(y, self.all(z, true)))", of(), &numbers(10), 3552);
        check("self.all(x, x == 0.0)", of(), &numbers(6_291_456), 25_165_826);
        check("self[1] == 0.0", of(), &numbers(5000), 2);
        let texts = |most, length| list(most, text(length));
        let of = || Type::list(Type::String);
        check("self[1] == self[1]", of(), &texts(8, 3_145_726), 314_577);
        check("self.join(' ') == 'aa bb'", of(), &texts(1_048_575, 3_145_726), 329_853_068_905);
        check("self.join(' ') == 'aa bb'", of(), &texts(10, 40), 43);
        check("self.isSorted() == true", of(), &texts(1_048_575, 3_145_726), 329_854_432_052);
        check("self.isSorted() == true", of(), &texts(10, 40), 52);
        let of = || Type::list(Type::list(Type::Double));
        check("self[0][0] == -1.0", of(), &list(51, Arc::new(numbers(9))), 3);
        let hours = || Type::list(Type::Duration);
        check("self[0].getHours() == 2", hours(), &list(5, text(32)), 4);
    }

    #[test]
    fn texts_cost_the_same_as_upstream() {
        const LONGEST: u64 = 3_145_726;
        for (rule, unbounded, most, bounded) in [
            ("self.contains('test')", 314_574, 40, 5),
            ("self.startsWith('test')", 2, 60, 2),
            ("size(self + \"hello\") > size(\"hello\")", 314_578, 16, 7),
            ("self.matches('x')", 314_574, 200, 22),
            ("''.matches('(((((((((())))))))))[0-9]')", 7, 40, 7),
            ("self.matches('')", 1, 400, 1),
            ("self == 'x'", 2, 0, 1),
            ("self.find('[0-9]+') == ''", 629_147, 40, 11),
            ("self.lowerAscii() == 'lower!'", 314_575, 40, 6),
        ] {
            check(rule, Type::String, &text(LONGEST), unbounded);
            check(rule, Type::String, &text(most), bounded);
        }
        // The length of a number as text is unknown.
        let (variables, nothing) = ([("self", Type::Int)], Extent::default());
        let program = crate::compile("'odd: ' + string(self)", &variables).expect("an expression");
        assert!(program.most(&variables, &nothing) > 1_000_000_000);
    }

    #[test]
    fn maps_cost_the_same_as_upstream() {
        let map = |most, length| Extent {
            most,
            elements: Some(text(length)),
            is_map: true,
            ..Extent::default()
        };
        let of = || Type::Map(Arc::new(Type::String));
        check("self.all(x, true)", of(), &map(393_215, 9), 1_179_647);
        check("self.all(x, x.contains(self[x]))", of(), &map(393_215, 3_145_726), 2_752_507);
        check("self.all(x, x.contains(self[x]))", of(), &map(10, 40), 72);
        check("oldSelf.size() == self.size()", of(), &map(10, 40), 5);
        let of = || Type::Map(Arc::new(Type::Timestamp));
        check("self['a'] == self['b']", of(), &map(7, 32), 8);
    }
}
