//! The Common Expression Language as used by Kubernetes: rules of custom resources, admission
//! policies, match conditions.
//!
//! ```text
//!  text ► compile (parse, check types) ► Program ► evaluate (values, budget) ► Value
//! ```
//!
//! In: an expression, and its variables with their types. Out: a [`Program`], or an error text; for a
//! program and values, a value or an error.
//!
//! The grammar comes from the crate `cel`; types, values, functions and costs are here, because that crate
//! has no cost limit and none of Kubernetes' functions. Values of type [`Type::Dyn`] are checked during
//! evaluation, all others before.

mod charge;
mod check;
pub mod cost;
pub mod environments;
mod eval;
mod functions;
mod library_cost;
pub mod types;
mod value;

use std::collections::BTreeSet;

use base::metrics::{DEFAULT_BUCKETS, Family, Timer};
use cel_parser::common::ast::{Expr, IdedExpr, LiteralValue, operators};
use cel_parser::parser::Parser;

pub use eval::{Budget, EvalError};
pub use types::{ListKind, Object, Type};
pub use value::{Host, Value};

/// The maximum length of an expression, in bytes.
const LONGEST: usize = 64 << 10;
/// The parser recurses for each bracket, and takes up to 160 KB of stack for it in a debug build: more
/// would crash the process. Upstream: 250, with stacks that grow.
const DEEPEST: usize = 64;
/// The parser's stack in bytes; only touched pages use memory.
const PARSER_STACK: usize = 16 << 20;

/// A compile error in upstream's words (without `compilation failed: `).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CompileError(pub String);

/// A checked expression, which can be shared and evaluated any number of times.
#[derive(Debug)]
pub struct Program {
    root: IdedExpr,
    kind: Type,
    names: BTreeSet<String>,
}

static COMPILATION: Family = Family::histogram(
    "apiserver_cel_compilation_duration_seconds",
    "[BETA] CEL compilation time in seconds.",
    &[],
    DEFAULT_BUCKETS,
);
static EVALUATION: Family = Family::histogram(
    "apiserver_cel_evaluation_duration_seconds",
    "[BETA] CEL evaluation time in seconds.",
    &[],
    DEFAULT_BUCKETS,
);

/// The metrics of all expressions of the process.
pub fn encode_metrics(out: &mut String) {
    base::metrics::encode(&[&COMPILATION, &EVALUATION], out);
}

/// Parses and checks. `variables` are all variables of the expression.
pub fn compile(text: &str, variables: &[(&str, Type)]) -> Result<Program, CompileError> {
    let timer = Timer::start();
    let program = parsed_and_checked(text, variables);
    COMPILATION.took(&[], timer.elapsed());
    program
}

fn parsed_and_checked(text: &str, variables: &[(&str, Type)]) -> Result<Program, CompileError> {
    if text.len() > LONGEST {
        return Err(CompileError(format!(
            "ERROR: <input>:-1:0: expression code point size exceeds limit: size: {}, limit {LONGEST}",
            text.len()
        )));
    }
    if nesting(text) > DEEPEST {
        return Err(CompileError(format!(
            "ERROR: <input>:-1:0: expression recursion limit exceeded: {DEEPEST}"
        )));
    }
    let parser = Parser::new().enable_optional_syntax(true).enable_ident_escape_syntax(true);
    let parse = || parser.parse_with_source_info(text);
    let parsed = stacker::maybe_grow(PARSER_STACK, PARSER_STACK, parse);
    let (root, source) = parsed.map_err(|errors| CompileError(syntax_error(text, &errors)))?;
    let kind = check::check(&root, variables, &source, text)?;
    let mut names = BTreeSet::new();
    collect_names(&root.expr, &mut names);
    Ok(Program { root, kind, names })
}

/// The maximum nesting of brackets and conditionals, outside of string literals.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest, mut choices) = (0_usize, 0, 0_usize);
    let mut quote = None;
    let mut before = b' ';
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (Some(_), b'\\') => drop(bytes.next()),
            (Some(open), _) if open == byte => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => depth = depth.saturating_sub(1),
            // `.?field` and `[?key]` are no conditionals.
            (None, b'?') if !matches!(before, b'.' | b'[') => choices += 1,
            (None, _) => {}
        }
        deepest = deepest.max(depth);
        before = byte;
    }
    deepest + choices / 2
}

fn syntax_error(text: &str, errors: &cel_parser::ParseErrors) -> String {
    let show = |error: &cel_parser::ParseError| {
        // Both start at one.
        let (line, column) = (error.pos.0.max(1) as usize, error.pos.1.max(1) as usize - 1);
        let message = error.msg.strip_prefix("Syntax error: ").unwrap_or(&error.msg);
        check::located(text, line, column, &format!("Syntax error: {message}"))
    };
    errors.errors.iter().map(show).collect::<Vec<_>>().join("\n")
}

impl Program {
    /// The type of its result, as far as known.
    pub fn kind(&self) -> &Type {
        &self.kind
    }

    /// Whether it is only a path into a value of unknown type. (For other expressions, `dyn` may just mean
    /// that the checker knows too little.)
    fn is_surely_dynamic(&self, variables: &[(&str, Type)]) -> bool {
        let mut at = &self.root.expr;
        let mut is_path = false;
        loop {
            at = match at {
                Expr::Select(select) if !select.test => &select.operand.expr,
                Expr::Call(call) if call.func_name == operators::INDEX && call.target.is_none() => {
                    match call.args.first() {
                        Some(operand) => &operand.expr,
                        None => return false,
                    }
                }
                Expr::Ident(name) => {
                    let known = variables.iter().find(|(known, _)| known == name);
                    return known.is_some_and(|(_, kind)| {
                        *kind == Type::Dyn || (is_path && matches!(kind, Type::Object(_)))
                    });
                }
                _ => return false,
            };
            is_path = true;
        }
    }

    /// Whether it uses this variable.
    pub fn uses(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Whether it selects this field of this variable, as `variable.field` or `variable.?field`.
    pub fn selects(&self, variable: &str, field: &str) -> bool {
        selects(&self.root.expr, variable, field)
    }

    /// Its maximum cost for values no larger than `extent`; `variables` as at compilation.
    pub fn most(&self, variables: &[(&str, Type)], extent: &cost::Extent) -> u64 {
        cost::most(&self.root, variables, extent)
    }

    /// Gets `variables` by name when they are used: unused ones cost nothing.
    pub fn evaluate(
        &self,
        variables: &dyn Fn(&str) -> Option<Value>,
        budget: &mut Budget,
    ) -> Result<Value, EvalError> {
        let timer = Timer::start();
        let value = eval::evaluate(&self.root, variables, budget);
        EVALUATION.took(&[], timer.elapsed());
        value
    }
}

fn collect_names(expr: &Expr, names: &mut BTreeSet<String>) {
    if let Expr::Ident(name) = expr {
        names.insert(name.trim_start_matches('.').to_owned());
    }
    children(expr).into_iter().for_each(|child| collect_names(&child.expr, names));
}

fn selects(expr: &Expr, variable: &str, field: &str) -> bool {
    let is_variable = |one: &IdedExpr| matches!(&one.expr, Expr::Ident(name) if name == variable);
    let is_field = |one: &IdedExpr| match &one.expr {
        Expr::Literal(LiteralValue::String(text)) => text.inner() == field,
        _ => false,
    };
    let is_here = match expr {
        Expr::Select(select) => select.field == field && is_variable(&select.operand),
        Expr::Call(call) => {
            call.func_name == operators::OPT_SELECT
                && matches!(&call.args[..], [of, name] if is_variable(of) && is_field(name))
        }
        _ => false,
    };
    is_here || children(expr).into_iter().any(|child| selects(&child.expr, variable, field))
}

fn children(expr: &Expr) -> Vec<&IdedExpr> {
    let mut children: Vec<&IdedExpr> = vec![];
    match expr {
        Expr::Call(call) => {
            children.extend(call.target.as_deref());
            children.extend(&call.args);
        }
        Expr::Comprehension(one) => children.extend([
            &one.iter_range,
            &one.accu_init,
            &one.loop_cond,
            &one.loop_step,
            &one.result,
        ]),
        Expr::List(list) => children.extend(&list.elements),
        Expr::Select(select) => children.push(&select.operand),
        Expr::Map(map) => entries(&map.entries, &mut children),
        Expr::Struct(of) => entries(&of.entries, &mut children),
        Expr::Ident(_) | Expr::Literal(_) | Expr::Unspecified => {}
    }
    children
}

fn entries<'a>(
    entries: &'a [cel_parser::common::ast::IdedEntryExpr],
    children: &mut Vec<&'a IdedExpr>,
) {
    use cel_parser::common::ast::EntryExpr;
    for entry in entries {
        match &entry.expr {
            EntryExpr::StructField(field) => children.push(&field.value),
            EntryExpr::MapEntry(entry) => children.extend([&entry.key, &entry.value]),
        }
    }
}

#[cfg(test)]
mod tests;
