//! Walks the syntax tree. Scopes are as in Jinja: loops, macros and `with` open one, `if` does not; a macro sees the
//! scope it was defined in.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use minijinja::machinery::ast::{self, BinOpKind, CallArg, CompareOpKind, Expr, Stmt, UnaryOpKind};
use minijinja::value::ValueKind;

use super::args::Args;
use super::output::{collected, emit};
use super::value::{list, text, tuple, Dict, List, Namespace, Value};
use super::{filters, functions, meter, methods, operators, python, tests};
use crate::failure::{Failure, Result};

/// The tree outlives every rendering (mod.rs).
type Body = &'static [Stmt<'static>];
type Node = &'static Expr<'static>;

#[derive(Default)]
pub struct Scope {
    variables: RefCell<HashMap<&'static str, Value>>,
    parent: Option<Rc<Scope>>,
}

pub struct Macro {
    declaration: &'static ast::Macro<'static>,
    // Weak: the scope holds the macro.
    scope: Weak<Scope>,
}

pub struct LoopState {
    pub items: List,
    pub at: Cell<usize>,
    pub depth: usize,
    pub changed: RefCell<Option<Vec<Value>>>,
    node: &'static ast::ForLoop<'static>,
    // Weak: what is kept of a loop must not keep the scopes around it.
    scope: Weak<Scope>,
}

#[derive(PartialEq)]
enum Flow {
    On,
    Break,
    Continue,
}

pub struct Interpreter {
    source: &'static str,
    globals: Dict,
    // Namespaces may hold themselves and each other in long chains; they are emptied one by one at the end.
    namespaces: RefCell<Vec<Rc<Namespace>>>,
}

pub fn render((tree, source): (&'static Stmt<'static>, &'static str), globals: Dict) -> Result<String> {
    let interpreter = Interpreter { source, globals, namespaces: RefCell::default() };
    let Stmt::Template(template) = tree else { return Err(Failure::corrupt("template has no root")) };
    let mut out = String::new();
    let result = interpreter.run(&template.children, &Rc::new(Scope::default()), &mut out);
    for namespace in interpreter.namespaces.borrow().iter() {
        let members = std::mem::take(&mut *namespace.members.borrow_mut());
        drop(members);
    }
    result.map(|_| out)
}

impl Scope {
    fn inside(parent: &Rc<Scope>) -> Rc<Scope> {
        Rc::new(Scope { variables: RefCell::default(), parent: Some(parent.clone()) })
    }

    fn set(&self, name: &'static str, value: Value) {
        // The old value is dropped after the borrow has ended.
        let _old = self.variables.borrow_mut().insert(name, value);
    }

    fn get(&self, name: &str) -> Result<Option<Value>> {
        let mut scope = Some(self);
        while let Some(here) = scope {
            if let Some(value) = here.variables.borrow().get(name) {
                return Ok(Some(value.clone()));
            }
            meter::work(1)?;
            scope = here.parent.as_deref();
        }
        Ok(None)
    }
}

impl Interpreter {
    pub fn keep(&self, namespace: Rc<Namespace>) -> Result<Value> {
        meter::room(256)?;
        meter::take(256);
        self.namespaces.borrow_mut().push(namespace.clone());
        Ok(Value::Namespace(namespace))
    }

    fn run(&self, body: Body, scope: &Rc<Scope>, out: &mut String) -> Result<Flow> {
        for statement in body {
            let flow = self.statement(statement, scope, out)?;
            if flow != Flow::On {
                return Ok(flow);
            }
        }
        Ok(Flow::On)
    }

    /// Runs `body` into a text of its own.
    fn capture(&self, body: Body, scope: &Rc<Scope>) -> Result<Value> {
        text(collected(|out| self.run(body, scope, out).map(|_| ()))?)
    }

    fn statement(&self, statement: &'static Stmt<'static>, scope: &Rc<Scope>, out: &mut String) -> Result<Flow> {
        let _level = meter::deeper()?;
        let line;
        let result = match statement {
            Stmt::EmitRaw(node) => {
                emit(out, node.raw)?;
                return Ok(Flow::On);
            }
            Stmt::EmitExpr(node) => {
                line = node.span().start_line;
                self.expression(&node.expr, scope).and_then(|value| python::print(&value, out)).map(|()| Flow::On)
            }
            Stmt::IfCond(node) => {
                line = node.span().start_line;
                self.expression(&node.expr, scope).and_then(|test| {
                    self.run(if test.truthy() { &node.true_body } else { &node.false_body }, scope, out)
                })
            }
            Stmt::ForLoop(node) => {
                line = node.span().start_line;
                self.expression(&node.iter, scope).and_then(|items| self.for_loop(node, items, 0, scope, out))
            }
            Stmt::Set(node) => {
                line = node.span().start_line;
                self.expression(&node.expr, scope).and_then(|value| self.assign(&node.target, value, scope))
            }
            Stmt::SetBlock(node) => {
                line = node.span().start_line;
                self.capture(&node.body, &Scope::inside(scope))
                    .and_then(|value| match &node.filter {
                        Some(filter) => self.filter_chain(filter, value, scope),
                        None => Ok(value),
                    })
                    .and_then(|value| self.assign(&node.target, value, scope))
            }
            Stmt::WithBlock(node) => {
                line = node.span().start_line;
                self.with_block(node, scope, out)
            }
            Stmt::FilterBlock(node) => {
                line = node.span().start_line;
                self.capture(&node.body, &Scope::inside(scope))
                    .and_then(|value| self.filter_chain(&node.filter, value, scope))
                    .and_then(|value| python::print(&value, out))
                    .map(|()| Flow::On)
            }
            Stmt::Macro(node) => {
                scope.set(node.name, Value::Macro(Rc::new(Macro { declaration: node, scope: Rc::downgrade(scope) })));
                return Ok(Flow::On);
            }
            Stmt::CallBlock(node) => {
                line = node.span().start_line;
                self.call_block(node, scope, out)
            }
            Stmt::Template(node) => return self.run(&node.children, scope, out),
            Stmt::AutoEscape(node) => return self.run(&node.body, scope, out),
            Stmt::Continue(_) => return Ok(Flow::Continue),
            Stmt::Break(_) => return Ok(Flow::Break),
            Stmt::Do(node) => return Err(Failure::invalid("unknown tag 'do'").at_line(node.span().start_line)),
        };
        result.map_err(|failure| failure.at_line(line))
    }

    fn with_block(&self, node: &'static ast::WithBlock<'static>, scope: &Rc<Scope>, out: &mut String) -> Result<Flow> {
        let inner = Scope::inside(scope);
        for (target, value) in &node.assignments {
            self.assign(target, self.expression(value, scope)?, &inner)?;
        }
        self.run(&node.body, &inner, out)
    }

    fn call_block(&self, node: &'static ast::CallBlock<'static>, scope: &Rc<Scope>, out: &mut String) -> Result<Flow> {
        let callee = self.expression(&node.call.expr, scope)?;
        let mut args = self.args(&node.call.args, scope)?;
        let caller = Macro { declaration: &node.macro_decl, scope: Rc::downgrade(scope) };
        args.named.push(("caller".to_owned(), Value::Macro(Rc::new(caller))));
        python::print(&self.call(&callee, args)?, out)?;
        Ok(Flow::On)
    }

    fn for_loop(
        &self,
        node: &'static ast::ForLoop<'static>,
        items: Value,
        depth: usize,
        scope: &Rc<Scope>,
        out: &mut String,
    ) -> Result<Flow> {
        let mut items = items.items()?;
        if let Some(filter) = &node.filter_expr {
            let mut kept = Vec::new();
            for item in items {
                let inner = Scope::inside(scope);
                self.assign(&node.target, item.clone(), &inner)?;
                if self.expression(filter, &inner)?.truthy() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        if items.is_empty() {
            return self.run(&node.else_body, &Scope::inside(scope), out);
        }
        let Value::List(items) = list(items)? else { unreachable!() };
        let state = Rc::new(LoopState {
            items,
            at: Cell::new(0),
            depth,
            changed: RefCell::default(),
            node,
            scope: Rc::downgrade(scope),
        });
        for (at, item) in state.items.iter().enumerate() {
            meter::work(1)?;
            state.at.set(at);
            let inner = Scope::inside(scope);
            inner.set("loop", Value::Loop(state.clone()));
            self.assign(&node.target, item.clone(), &inner)?;
            if self.run(&node.body, &inner, out)? == Flow::Break {
                break;
            }
        }
        Ok(Flow::On)
    }

    fn assign(&self, target: Node, value: Value, scope: &Rc<Scope>) -> Result<Flow> {
        match target {
            Expr::Var(name) => scope.set(name.id, value),
            Expr::List(targets) => {
                let values = value.items()?;
                if values.len() != targets.items.len() {
                    return Err(Failure::invalid(format!(
                        "{} values to unpack into {} names",
                        values.len(),
                        targets.items.len()
                    )));
                }
                for (target, value) in targets.items.iter().zip(values) {
                    self.assign(target, value, scope)?;
                }
            }
            Expr::GetAttr(node) => match self.expression(&node.expr, scope)? {
                Value::Namespace(namespace) => functions::set_member(&namespace, node.name, value)?,
                other => {
                    return Err(Failure::invalid(format!(
                        "only a namespace's attributes can be set, not those of '{}'",
                        other.type_name()
                    )))
                }
            },
            _ => return Err(Failure::invalid("cannot assign to this expression")),
        }
        Ok(Flow::On)
    }

    fn expression(&self, node: Node, scope: &Rc<Scope>) -> Result<Value> {
        let _level = meter::deeper()?;
        match node {
            Expr::Var(name) => self.variable(name.id, scope),
            Expr::Const(constant) => constant_value(&constant.value),
            Expr::GetAttr(node) => {
                let object = self.expression(&node.expr, scope)?;
                operators::attribute(&object, node.name).map_err(|failure| explain(failure, &object, &node.expr))
            }
            Expr::GetItem(node) => {
                let object = self.expression(&node.expr, scope)?;
                let key = self.expression(&node.subscript_expr, scope)?;
                operators::item(&object, &key).map_err(|failure| explain(failure, &object, &node.expr))
            }
            Expr::Slice(node) => {
                let object = self.expression(&node.expr, scope)?;
                let bound = |bound: &'static Option<Expr<'static>>| match bound {
                    Some(bound) => self.expression(bound, scope),
                    None => Ok(Value::None),
                };
                operators::slice(&object, [bound(&node.start)?, bound(&node.stop)?, bound(&node.step)?])
            }
            Expr::Call(node) => {
                let callee = self.expression(&node.expr, scope)?;
                let args = self.args(&node.args, scope)?;
                self.call(&callee, args).map_err(|failure| explain(failure, &callee, &node.expr))
            }
            Expr::Filter(_) => self.filter_chain(node, Value::Undefined, scope),
            Expr::Test(node) => {
                let value = self.expression(&node.expr, scope)?;
                tests::apply(node.name, &value, &self.args(&node.args, scope)?.positional).map(Value::Bool)
            }
            Expr::IfExpr(node) => {
                if self.expression(&node.test_expr, scope)?.truthy() {
                    self.expression(&node.true_expr, scope)
                } else {
                    node.false_expr.as_ref().map_or(Ok(Value::Undefined), |other| self.expression(other, scope))
                }
            }
            Expr::UnaryOp(node) => {
                let value = self.expression(&node.expr, scope)?;
                match node.op {
                    UnaryOpKind::Not => Ok(Value::Bool(!value.truthy())),
                    UnaryOpKind::Neg => operators::negate(&value),
                }
            }
            Expr::BinOp(node) => self.binary(node, scope),
            Expr::Compare(node) => {
                let mut left = self.expression(&node.expr, scope)?;
                for step in &node.ops {
                    let right = self.expression(&step.expr, scope)?;
                    let holds = match step.op {
                        CompareOpKind::Eq => operators::binary(BinOpKind::Eq, &left, &right)?.truthy(),
                        CompareOpKind::Ne => operators::binary(BinOpKind::Ne, &left, &right)?.truthy(),
                        CompareOpKind::Lt => operators::binary(BinOpKind::Lt, &left, &right)?.truthy(),
                        CompareOpKind::Lte => operators::binary(BinOpKind::Lte, &left, &right)?.truthy(),
                        CompareOpKind::Gt => operators::binary(BinOpKind::Gt, &left, &right)?.truthy(),
                        CompareOpKind::Gte => operators::binary(BinOpKind::Gte, &left, &right)?.truthy(),
                        CompareOpKind::In => operators::contains(&right, &left)?,
                        CompareOpKind::NotIn => !operators::contains(&right, &left)?,
                    };
                    if !holds {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Expr::List(node) => {
                let items = node.items.iter().map(|item| self.expression(item, scope)).collect::<Result<_>>()?;
                // The parser makes one thing of lists and tuples; the source knows.
                if self.source.as_bytes().get(node.span().start_offset as usize) == Some(&b'[') {
                    list(items)
                } else {
                    tuple(items)
                }
            }
            Expr::Map(node) => {
                let mut pairs = Vec::with_capacity(node.keys.len());
                for (key, value) in node.keys.iter().zip(&node.values) {
                    pairs.push((self.expression(key, scope)?, self.expression(value, scope)?));
                }
                Ok(Value::Dict(Dict::new(pairs)?))
            }
        }
    }

    fn binary(&self, node: &'static ast::BinOp<'static>, scope: &Rc<Scope>) -> Result<Value> {
        let left = self.expression(&node.left, scope)?;
        match node.op {
            BinOpKind::ScAnd if !left.truthy() => return Ok(left),
            BinOpKind::ScOr if left.truthy() => return Ok(left),
            _ => {}
        }
        let right = self.expression(&node.right, scope)?;
        match node.op {
            BinOpKind::ScAnd | BinOpKind::ScOr => Ok(right),
            op => operators::binary(op, &left, &right),
        }
    }

    fn variable(&self, name: &'static str, scope: &Rc<Scope>) -> Result<Value> {
        if let Some(value) = scope.get(name)? {
            return Ok(value);
        }
        if let Some(value) = self.globals.get_str(name) {
            return Ok(value.clone());
        }
        Ok(functions::find(name).map_or(Value::Undefined, Value::Function))
    }

    fn args(&self, nodes: &'static [CallArg<'static>], scope: &Rc<Scope>) -> Result<Args> {
        let mut args = Args::default();
        for node in nodes {
            match node {
                CallArg::Pos(node) => args.positional.push(self.expression(node, scope)?),
                CallArg::Kwarg(name, node) => args.named.push(((*name).to_owned(), self.expression(node, scope)?)),
                CallArg::PosSplat(node) => args.positional.extend(self.expression(node, scope)?.items()?),
                CallArg::KwargSplat(node) => match self.expression(node, scope)? {
                    Value::Dict(dict) => {
                        for (key, value) in dict.entries() {
                            let name = key.as_str().ok_or_else(|| Failure::invalid("keywords must be strings"))?;
                            meter::work_bytes(name.len())?;
                            args.named.push((name.to_owned(), value.clone()));
                        }
                    }
                    other => {
                        return Err(Failure::invalid(format!(
                            "argument after ** must be a mapping, not {}",
                            other.type_name()
                        )))
                    }
                },
            }
        }
        Ok(args)
    }

    /// Applies the filters of `node` to their operand, or to `base` where the innermost has none.
    fn filter_chain(&self, node: Node, base: Value, scope: &Rc<Scope>) -> Result<Value> {
        let Expr::Filter(filter) = node else { return self.expression(node, scope) };
        let _level = meter::deeper()?;
        let value = match &filter.expr {
            Some(operand) => self.filter_chain(operand, base, scope)?,
            None => base,
        };
        filters::apply(filter.name, value, &self.args(&filter.args, scope)?)
    }

    fn call(&self, callee: &Value, args: Args) -> Result<Value> {
        let _level = meter::deeper()?;
        match callee {
            Value::Function(function) => functions::call(self, *function, &args),
            Value::Macro(called) => self.call_macro(called, args),
            Value::Method(method) => match &method.0 {
                Value::Loop(state) => methods::call_loop(state, &method.1, &args),
                object => methods::call(object, &method.1, &args),
            },
            Value::Loop(state) => self.recurse(state, args),
            Value::Joiner(joiner) => {
                if joiner.1.replace(true) {
                    Ok(joiner.0.clone())
                } else {
                    text("")
                }
            }
            Value::Undefined => Err(Failure::invalid("is undefined")),
            other => Err(Failure::invalid(format!("'{}' object is not callable", other.type_name()))),
        }
    }

    fn recurse(&self, state: &Rc<LoopState>, mut args: Args) -> Result<Value> {
        let (true, Some(scope), Some(items)) = (state.node.recursive, state.scope.upgrade(), args.positional.pop())
        else {
            return Err(Failure::invalid("loop() needs one argument and the 'recursive' marker"));
        };
        text(collected(|out| self.for_loop(state.node, items, state.depth + 1, &scope, out).map(|_| ()))?)
    }

    fn call_macro(&self, called: &Macro, args: Args) -> Result<Value> {
        let declaration = called.declaration;
        let Some(outer) = called.scope.upgrade() else {
            return Err(Failure::invalid(format!("macro '{}' has left its scope", declaration.name)));
        };
        let scope = Scope::inside(&outer);
        let mut named = args.named;
        let mut positional = args.positional.into_iter();
        let first_default = declaration.args.len() - declaration.defaults.len();
        for (i, parameter) in declaration.args.iter().enumerate() {
            let Expr::Var(name) = parameter else { continue };
            let value = if let Some(value) = positional.next() {
                value
            } else if let Some(at) = named.iter().position(|(given, _)| given == name.id) {
                named.swap_remove(at).1
            } else if i >= first_default {
                self.expression(&declaration.defaults[i - first_default], &scope)?
            } else {
                Value::Undefined
            };
            scope.set(name.id, value);
        }
        if let Some(at) = named.iter().position(|(given, _)| given == "caller") {
            scope.set("caller", named.swap_remove(at).1);
        }
        scope.set("varargs", tuple(positional.collect())?);
        let kwargs = named.into_iter().map(|(name, value)| Ok((text(name)?, value))).collect::<Result<_>>()?;
        scope.set("kwargs", Value::Dict(Dict::new(kwargs)?));
        self.capture(&declaration.body, &scope)
    }
}

/// Puts the name of what is undefined into the message.
fn explain(failure: Failure, object: &Value, node: Node) -> Failure {
    if failure.located || !matches!(object, Value::Undefined) {
        return failure;
    }
    match node {
        Expr::Var(name) => Failure::new(failure.status, format!("'{}' is undefined", name.id)),
        Expr::GetAttr(node) => Failure::new(failure.status, format!("attribute '{}' is undefined", node.name)),
        _ => failure,
    }
}

fn constant_value(constant: &minijinja::Value) -> Result<Value> {
    match constant.kind() {
        ValueKind::None => Ok(Value::None),
        ValueKind::Bool => Ok(Value::Bool(constant.is_true())),
        ValueKind::String => text(constant.as_str().unwrap_or_default()),
        ValueKind::Number => match i128::try_from(constant.clone()) {
            Ok(whole) if constant.is_integer() => Ok(Value::Int(whole)),
            _ => f64::try_from(constant.clone()).map(Value::Float).map_err(|e| Failure::invalid(e.to_string())),
        },
        kind => Err(Failure::corrupt(format!("constant of kind {kind}"))),
    }
}
