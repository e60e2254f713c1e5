// As much of a browser as the script of benchmarks/report.html needs, for node. stdin: {html data, events}.
'use strict';
const page = JSON.parse(require('fs').readFileSync(0, 'utf8'));
const known = {};

class Element {
  constructor(tag) {
    Object.assign(this, {tag, children: [], dataset: {}, attributes: {}, listeners: {}, className: '', textContent: '', parent: null});
    const self = this;
    this.style = {setProperty(name, value) { self.style[name] = value; }};
    this.classList = {toggle(name, on) {
      const names = new Set(self.className.split(' ').filter(Boolean));
      if (on) { names.add(name); } else { names.delete(name); }
      self.className = [...names].join(' ');
    }};
  }
  append(...items) { items.forEach((item) => { item.parent = this; this.children.push(item); }); }
  replaceChildren(...items) { this.children = []; this.append(...items); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, f) { (this.listeners[name] = this.listeners[name] || []).push(f); }
  contains(item) { return !!item && (item === this || this.contains(item.parent)); }
  closest() { return 'i' in this.dataset ? this : this.parent && this.parent.closest(); }
  all() { return this.children.flatMap((child) => [child, ...child.all()]); }
  querySelectorAll() { return this.all().filter((item) => 'i' in item.dataset); }
  querySelector() { return this.querySelectorAll().find((item) => item.className.includes('held')); }
  focus() { document.activeElement = this; this.fire('focusin'); }
  fire(name, event = {}) {
    for (let at = this; at; at = at.parent) {
      (at.listeners[name] || []).forEach((f) => f(Object.assign({target: this, preventDefault() {}}, event)));
    }
  }
  text() { return this.textContent + this.children.map((child) => child.text()).join('|'); }
}

global.document = {
  activeElement: null,
  createElement: (tag) => new Element(tag),
  getElementById(id) { return known[id] = known[id] || new Element(id); },
};
const byId = document.getElementById;
byId('unmasking-data').textContent = page.unmasking;
byId('says-data').textContent = page.says;
JSON.parse(page.says).forEach((_, i) => {
  const dot = new Element('circle');
  dot.dataset.i = i;
  byId('latents').append(dot);
});
require('vm').runInThisContext(page.script);

// each event: [id, event, value]; a number in place of the event points at the cell of this number
const seen = page.events.map(([id, name, value]) => {
  const target = byId(id);
  if (typeof name === 'number') {
    target.children[name].fire('pointerover');
  } else if (name === 'keydown') {
    target.querySelector().focus();
    target.querySelector().fire('keydown', {key: value});
  } else {
    target.value = value;
    target.fire(name);
  }
  return {at: byId('at').text(), cells: byId('cells').children.map((cell) => cell.textContent),
          masked: byId('cells').children.map((cell) => cell.className.includes('masked')),
          candidates: byId('candidates').text(), says: byId('says').text()};
});
console.log(JSON.stringify(seen));
