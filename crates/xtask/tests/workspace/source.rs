//! The modules of a crate, and the paths by which they use each other, read from their text.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::visit::{self, Visit};
use syn::{
    Attribute, ImplItem, Item, ItemConst, ItemEnum, ItemStatic, ItemStruct, ItemTrait, ItemType, ItemUnion, ItemUse,
    Path, UseTree,
};

/// A module's place in its crate: empty for the root.
pub(crate) type ModulePath = Vec<String>;

/// The modules of a crate.
pub(crate) struct Modules(BTreeMap<ModulePath, Module>);

/// The contents of one module, as its text declares them.
#[derive(Default)]
pub(crate) struct Module {
    pub(crate) file: String,
    /// The path that each imported name stands for.
    imports: BTreeMap<String, Vec<String>>,
    /// Modules of which all names are imported.
    globs: Vec<Vec<String>>,
    /// Names of the items that stand here.
    defined: BTreeSet<String>,
    /// All paths in imports and code.
    paths: BTreeSet<Vec<String>>,
}

impl Modules {
    /// Reads a crate from its files below `src`.
    pub(crate) fn read(files: &BTreeMap<String, String>) -> Self {
        let mut modules = Self(BTreeMap::new());
        let root = ["lib.rs", "main.rs"].into_iter().find(|name| files.contains_key(*name));
        let root = root.expect("a crate has lib.rs or main.rs");
        modules.add(files, Vec::new(), root, &items(files, root));
        modules
    }

    fn add(&mut self, files: &BTreeMap<String, String>, path: ModulePath, file: &str, items: &[Item]) {
        let mut module = Module { file: file.to_owned(), ..Module::default() };
        for item in items.iter().filter(|item| !is_for_tests(item)) {
            module.defined.extend(name(item));
            let Item::Mod(inner) = item else {
                module.visit_item(item);
                continue;
            };
            let child = child(&path, &inner.ident.to_string());
            if let Some((_, items)) = &inner.content {
                self.add(files, child, file, items);
                continue;
            }
            let stem = child.join("/");
            let candidates = [format!("{stem}.rs"), format!("{stem}/mod.rs")];
            let file = candidates.iter().find(|file| files.contains_key(*file));
            let file = file.unwrap_or_else(|| panic!("no file of module {}", child.join("::")));
            self.add(files, child, file, &self::items(files, file));
        }
        self.0.insert(path, module);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ModulePath, &Module)> {
        self.0.iter()
    }

    /// The modules whose items `module` names, each with the path that names it. Names that a module only passes on
    /// belong to the module that defines them.
    pub(crate) fn uses<'a>(&'a self, at: &ModulePath, module: &'a Module) -> Vec<(ModulePath, &'a [String])> {
        let used = |path: &'a Vec<String>| Some((self.resolve(at, path, 0)?, &path[..]));
        module.paths.iter().filter_map(used).collect()
    }

    /// The module that defines the item at `path`, seen from `module`; `None` if the path leads out of the crate.
    fn resolve(&self, module: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
        let mut at = module;
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                at = &[];
                rest = &path[1..];
            }
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    (at, rest) = (&at[..at.len().checked_sub(1)?], &rest[1..]);
                }
            }
            name if !self.0[at].imports.contains_key(name) && !self.0.contains_key(&child(at, name)) => return None,
            _ => {}
        }
        self.walk(at, rest, depth)
    }

    fn walk(&self, at: &[String], rest: &[String], depth: usize) -> Option<ModulePath> {
        /// The most modules that a name may pass through. A name that passes through more of them passes through
        /// itself.
        const MAX_DEPTH: usize = 32;
        let here = || Some(at.to_vec());
        let (Some(name), true) = (rest.first(), depth < MAX_DEPTH) else { return here() };
        let inner = child(at, name);
        if self.0.contains_key(&inner) {
            return self.walk(&inner, &rest[1..], depth + 1);
        }
        let module = &self.0[at];
        if let Some(target) = module.imports.get(name) {
            let path = [&target[..], &rest[1..]].concat();
            return self.resolve(at, &path, depth + 1).or_else(here);
        }
        if module.defined.contains(name) {
            return here();
        }
        let mut globs = module.globs.iter().filter_map(|glob| self.resolve(at, glob, depth + 1));
        let knows = |m: &ModulePath| {
            let module = &self.0[m];
            let named = module.imports.contains_key(name) || module.defined.contains(name);
            m != at && (named || self.0.contains_key(&child(m, name)))
        };
        match globs.find(knows) {
            Some(source) => self.walk(&source, rest, depth + 1),
            None => here(),
        }
    }
}

fn child(at: &[String], name: &str) -> ModulePath {
    [at, &[name.to_owned()]].concat()
}

fn items(files: &BTreeMap<String, String>, file: &str) -> Vec<Item> {
    syn::parse_file(&files[file]).unwrap_or_else(|error| panic!("{file}: {error}")).items
}

impl Module {
    fn import(&mut self, tree: &UseTree, path: &[String]) {
        // `self` in braces stands for the path before them.
        let target = |word: &Ident| if word == "self" { path.to_vec() } else { child(path, &word.to_string()) };
        let (name, path) = match tree {
            UseTree::Path(tree) => return self.import(&tree.tree, &target(&tree.ident)),
            UseTree::Group(group) => return group.items.iter().for_each(|tree| self.import(tree, path)),
            UseTree::Glob(_) => {
                self.globs.push(path.to_vec());
                (None, path.to_vec())
            }
            UseTree::Name(tree) => (target(&tree.ident).last().cloned(), target(&tree.ident)),
            UseTree::Rename(tree) => (Some(tree.rename.to_string()), target(&tree.ident)),
        };
        self.imports.extend(name.map(|name| (name, path.clone())));
        self.paths.insert(path);
    }

    /// Adds a path in code. A name alone is none: an import brought it here, or it stands here.
    fn add_path(&mut self, path: Vec<String>) {
        if path.len() > 1 {
            self.paths.insert(path);
        }
    }

    /// Adds the paths in what a macro is given: words between double colons, as its syntax is not known.
    fn add_paths(&mut self, tokens: TokenStream) {
        let (mut path, mut colons) = (Vec::new(), 0);
        for tree in tokens {
            match tree {
                TokenTree::Punct(sign) if sign.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(word) if colons == 2 => path.push(word.to_string()),
                TokenTree::Ident(word) => self.add_path(mem::replace(&mut path, vec![word.to_string()])),
                TokenTree::Group(group) => self.add_paths(group.stream()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => self.add_path(mem::take(&mut path)),
            }
            colons = 0;
        }
        self.add_path(path);
    }
}

impl<'a> Visit<'a> for Module {
    fn visit_item(&mut self, item: &'a Item) {
        if !is_for_tests(item) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'a ImplItem) {
        if !is_for_tests(item) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a ItemUse) {
        self.import(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'a Path) {
        if path.leading_colon.is_none() {
            self.add_path(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_token_stream(&mut self, tokens: &'a TokenStream) {
        self.add_paths(tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'a Attribute) {}
}

/// The name of an item that a path may lead to.
fn name(item: &Item) -> Option<String> {
    match item {
        Item::Fn(item) => Some(item.sig.ident.to_string()),
        Item::Macro(item) => item.ident.as_ref().map(Ident::to_string),
        Item::Const(ItemConst { ident, .. })
        | Item::Enum(ItemEnum { ident, .. })
        | Item::Static(ItemStatic { ident, .. })
        | Item::Struct(ItemStruct { ident, .. })
        | Item::Trait(ItemTrait { ident, .. })
        | Item::Type(ItemType { ident, .. })
        | Item::Union(ItemUnion { ident, .. }) => Some(ident.to_string()),
        _ => None,
    }
}

/// Whether an attribute before an item, such as `#[cfg(test)]`, keeps it for tests alone.
fn is_for_tests(item: &impl ToTokens) -> bool {
    let trees: Vec<TokenTree> = item.to_token_stream().into_iter().collect();
    let attributes = trees.chunks(2).map_while(|pair| match pair {
        [TokenTree::Punct(sign), TokenTree::Group(group)] if sign.as_char() == '#' => Some(words(group.stream())),
        _ => None,
    });
    let has = |attribute: &[String], word: &str| attribute.iter().any(|other| other == word);
    attributes.into_iter().any(|words| words[0] == "cfg" && has(&words, "test") && !has(&words, "not"))
}

/// The words of a Rust text: keywords and names, without those in comments and literals.
pub(crate) fn words(tokens: TokenStream) -> Vec<String> {
    let of_tree = |tree| match tree {
        TokenTree::Ident(word) => vec![word.to_string()],
        TokenTree::Group(group) => words(group.stream()),
        TokenTree::Punct(_) | TokenTree::Literal(_) => Vec::new(),
    };
    tokens.into_iter().flat_map(of_tree).collect()
}

#[test]
fn comments_and_literals_are_no_words() {
    let text =
        "a::b // c::d\n/* e /* f */ g */ h(\"i \\\" j\", r#\"k \" l\"#, b\"m\", '\\'', 'n', '\\u{1F600}', &'o p)";
    assert_eq!(words(text.parse().unwrap()), ["a", "b", "h", "o", "p"]);
}
