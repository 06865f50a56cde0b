"""What the made-up documents are written with: words and sentences of three languages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """`things` and `properties` go from the words of a text to those of a paraphrase. The sentences are
    filled in with place, thing, property and value; filler is one of `openings`, `actions` and `endings`
    after another."""

    code: str
    syllables: tuple[tuple[str, ...], tuple[str, ...]]
    things: dict[str, str]
    properties: dict[str, str]
    fact: str
    note: str
    keywords: str
    paraphrase: str
    header: tuple[str, str, str, str]
    heading: str
    openings: tuple[str, ...]
    actions: tuple[str, ...]
    endings: tuple[str, ...]
    blank: str = " "


ENGLISH = Language(
    code="en",
    syllables=(
        ("Ald", "Bren", "Cor", "Dun", "Elm", "Fal", "Gren", "Hol", "Iver", "Kel", "Lor", "Marn"),
        ("mere", "wick", "stead", "combe", "thorpe", "ness", "gate", "burn"),
    ),
    things={
        "pumping station": "water works",
        "lighthouse": "beacon on the coast",
        "granary": "building where corn is stored",
        "swing bridge": "crossing that turns aside for ships",
        "brickworks": "factory for fired clay",
        "observatory": "place where the stars are watched",
        "tannery": "leather workshop",
        "signal box": "cabin of the railway",
    },
    properties={
        "inspection fee": "how much has to be paid for looking it over",
        "storage capacity": "how much it can hold",
        "lease number": "under which figure the contract of rent is filed",
        "repair budget": "what may be spent on mending it",
        "annual output": "what it yields in a year",
        "insurance value": "what is refunded if it burns down",
        "staff code": "by which digits those who work there are known",
        "survey index": "how it was rated when it was measured",
    },
    fact="The {property} of the {thing} in {place} is {value}.",
    note="For the {thing} in {place} the {property} was set to {value}.",
    keywords="{property} {thing} {place}",
    paraphrase="Tell me about the {thing} at {place}: {property}?",
    header=("place", "building", "item", "figure"),
    heading="Part {n}: general remarks",
    openings=(
        "The committee of the district",
        "An engineer from the county office",
        "Each of the older reports",
        "The owner of the neighbouring land",
        "A later survey",
        "The council",
        "Nobody among the residents",
        "The second contractor",
    ),
    actions=(
        "has described the pumping station and its fee in general terms",
        "asked for a granary with more capacity",
        "did not say which lease was meant",
        "considered the repair of the old lighthouse",
        "compared the output of the brickworks with that of other years",
        "wrote to the insurance about the observatory",
        "kept the code of the signal box in a drawer",
        "called the survey of the tannery incomplete",
        "walked along the river to the swing bridge",
        "found the roof in good condition",
    ),
    endings=(
        "before the meeting was closed",
        "although the budget had not been settled",
        "since the weather was too wet for any work",
        "as the chairman had proposed in spring",
        "without naming a figure",
        "and nothing was decided that day",
        "which the minutes mention only in passing",
    ),
)

GERMAN = Language(
    code="de",
    syllables=(
        (
            "Alt",
            "Brun",
            "Eichen",
            "Falken",
            "Grün",
            "Hasel",
            "König",
            "Lärchen",
            "Mühl",
            "Nord",
            "Rös",
            "Stein",
        ),
        ("bach", "hausen", "brück", "felde", "rode", "stätt", "büttel", "au"),
    ),
    things={
        "Pumpwerk": "Anlage zur Wasserförderung",
        "Leuchtturm": "Seezeichen an der Küste",
        "Kornspeicher": "Haus, in dem das Getreide liegt",
        "Drehbrücke": "Übergang, der für Schiffe zur Seite schwenkt",
        "Ziegelei": "Fabrik für gebrannten Ton",
        "Sternwarte": "Ort, an dem der Himmel beobachtet wird",
        "Gerberei": "Werkstatt für Leder",
        "Stellwerk": "Haus der Eisenbahn für Weichen",
    },
    properties={
        "Prüfgebühr": "wie viel kostet es, wenn jemand nachsieht, ob alles in Ordnung ist",
        "Lagerkapazität": "wie viel passt hinein",
        "Pachtnummer": "unter welcher Zahl ist der Vertrag abgelegt",
        "Reparaturbudget": "was darf das Ausbessern kosten",
        "Jahresleistung": "was bringt es in zwölf Monaten hervor",
        "Versicherungswert": "was wird ersetzt, wenn es abbrennt",
        "Personalschlüssel": "an welchen Ziffern erkennt man die Beschäftigten",
        "Vermessungsgröße": "welches Maß wurde aufgenommen",
    },
    fact="Für das Objekt {thing} in {place} beträgt der Posten {property} genau {value}.",
    note="Der Posten {property} des Objekts {thing} in {place} wurde auf {value} festgelegt.",
    keywords="{property} {thing} {place}",
    paraphrase="Es geht um {place}, {thing}: {property}?",
    header=("Ort", "Bauwerk", "Posten", "Zahl"),
    heading="Teil {n}: Allgemeines",
    openings=(
        "Der Ausschuss des Kreises",
        "Ein Ingenieur aus dem Landesamt",
        "Jeder der älteren Berichte",
        "Die Eigentümerin des Nachbargrundstücks",
        "Eine spätere Vermessung",
        "Der Gemeinderat",
        "Niemand unter den Anwohnern",
    ),
    actions=(
        "hat das Pumpwerk und seine Gebühren nur allgemein beschrieben",
        "bat um einen Speicher mit mehr Kapazität",
        "ließ offen, welche Pacht gemeint war",
        "erwog die Reparatur des alten Leuchtturms",
        "verglich die Leistung der Ziegelei mit der anderer Jahre",
        "schrieb der Versicherung wegen der Sternwarte",
        "verwahrte den Schlüssel des Stellwerks in einer Schublade",
        "nannte die Vermessung der Gerberei unvollständig",
        "ging am Fluss entlang bis zur Drehbrücke",
    ),
    endings=(
        "bevor die Sitzung geschlossen wurde",
        "obwohl das Budget noch nicht feststand",
        "weil das Wetter für die Arbeiten zu nass war",
        "wie es der Vorsitzende im Frühjahr vorgeschlagen hatte",
        "ohne eine Zahl zu nennen",
        "und an diesem Tag wurde nichts mehr beschlossen",
    ),
)

CHINESE = Language(
    code="zh",
    syllables=(
        ("青", "石", "云", "龙", "白", "南", "松", "金", "海", "柳", "临", "永"),
        ("岭", "浦", "溪", "庄", "湾", "桥镇", "塘", "坪"),
    ),
    things={
        "泵站": "抽水的设施",
        "灯塔": "海边给船指路的建筑",
        "粮仓": "存放谷物的房子",
        "转桥": "为船只让路的过河通道",
        "砖厂": "烧制黏土的工场",
        "天文台": "观看星星的地方",
        "制革坊": "加工皮子的作坊",
        "信号楼": "铁路上管道岔的小楼",
    },
    properties={
        "检验费": "请人查看要花多少钱",
        "储存容量": "最多能装多少",
        "租约编号": "合同归档用的是哪个数字",
        "维修预算": "修补可以花多少",
        "年产量": "十二个月能出多少",
        "保险金额": "烧毁以后能赔多少",
        "员工代码": "工作人员用哪几位数字表示",
        "测量指数": "量过以后评了多少分",
    },
    fact="{place}{thing}的{property}为{value}。",
    note="关于{place}的{thing}，其{property}定为{value}。",
    keywords="{place} {thing} {property}",
    paraphrase="{place}那个{thing}，{property}？",
    header=("地点", "建筑", "项目", "数字"),
    heading="第{n}部分：一般说明",
    openings=(
        "区委员会",
        "县里来的工程师",
        "以前的每份报告",
        "相邻土地的主人",
        "后来的一次测量",
        "镇议会",
        "没有一位居民",
    ),
    actions=(
        "只笼统地谈到泵站及其费用",
        "要求修建容量更大的粮仓",
        "没有说明指的是哪份租约",
        "考虑过旧灯塔的维修",
        "把砖厂的产量与往年作了比较",
        "就天文台一事写信给保险公司",
        "把信号楼的代码放在抽屉里",
        "认为制革坊的测量并不完整",
        "沿着河一直走到转桥",
    ),
    endings=(
        "当时会议还没有结束",
        "尽管预算尚未确定",
        "因为天气太潮湿无法施工",
        "正如主席在春天所建议的",
        "却没有给出数字",
        "那天没有再作决定",
    ),
    blank="",
)

LANGUAGES = {language.code: language for language in (ENGLISH, GERMAN, CHINESE)}
