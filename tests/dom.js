// As much of a browser as the script of sampling/report.html needs, for node.
// stdin: {data, script, events}. An event is [id, name, value]; cells are children of an element.
'use strict';
const page = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const known = {};

class Element {
  constructor() {
    Object.assign(this, {children: [], listeners: {}, style: {}, className: '', textContent: ''});
    this.classList = {toggle: (name, on) => {
      const names = this.className.split(' ').filter((one) => one !== name);
      this.className = (on ? [...names, name] : names).join(' ');
    }};
  }
  append(...items) {
    items.forEach((item) => { item.parent = this; this.children.push(item); });
  }
  replaceChildren(...items) { this.children = []; this.append(...items); }
  setAttribute() {}
  addEventListener(name, f) { (this.listeners[name] = this.listeners[name] || []).push(f); }
  contains(item) { return !!item && (item === this || this.contains(item.parent)); }
  focus() { document.activeElement = this; this.fire('focusin'); }
  fire(name, event = {}) {
    for (let at = this; at; at = at.parent) {
      (at.listeners[name] || []).forEach((f) => f({target: this, preventDefault() {}, ...event}));
    }
  }
  text() { return this.textContent + this.children.map((child) => child.text()).join('|'); }
}

global.document = {
  activeElement: null,
  createElement: () => new Element(),
  getElementById: (id) => known[id] = known[id] || new Element(),
};
const byId = document.getElementById, cells = byId('cells');
byId('unmasking-data').textContent = page.data;
require('vm').runInThisContext(page.script);

const seen = page.events.map(([id, name, value]) => {
  if (name === 'pointerover') {
    cells.children[value].fire(name);
  } else if (name === 'keydown') {
    document.activeElement.fire(name, {key: value});
  } else {
    byId(id).value = value;
    byId(id).fire(name);
  }
  return {at: byId('at').text(), cells: cells.children.map((cell) => cell.textContent),
          kinds: cells.children.map((cell) => cell.className),
          candidates: byId('candidates').text()};
});
console.log(JSON.stringify(seen));
